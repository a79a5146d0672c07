"""How each token came about: who drafted it, P, Q, the uniform, and what was decided.

Kinds of tokens are those of `specdec_hf.loop.streaming`, and "rejected" for the draft at which a
round stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from specdec_hf.lab.analysis.distributions import draft_probs, target_probs
from specdec_hf.loop.streaming import Kind, Step, TracedRound
from specdec_kernels.analysis import acceptance_uniforms, draw_uniforms

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Explained:
    """One token of a round; probabilities are those after the sampling parameters.

    Attributes:
        token, text: its id, and what it adds to the text.
        kind: how it came about.
        p: probability under the target, P.
        drafter: who drafted it; empty for recovered, bonus and plain tokens.
        q: probability under the drafter, Q, where something was drafted; 1 for a deterministic
            draft. Of a recovered token it is Q at the place of the rejected draft.
        accept_prob: of a draft, which is accepted if the uniform is smaller; None for other tokens.
        uniform: what decided. That of a recovered, bonus or plain token drew it: it is the first
            token whose cumulative probability exceeds the uniform, in the order of ids. None at
            temperature 0, where nothing is random.
        residual: probability of a recovered token under norm(max(P - Q, 0)).
        unread: drafts after a rejected one, which the verification did not look at.
    """

    token: int
    text: str
    kind: Kind | Literal["rejected"]
    p: float
    drafter: str = ""
    q: float | None = None
    accept_prob: float | None = None
    uniform: float | None = None
    residual: float | None = None
    unread: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without those that do not apply."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


@dataclass
class Explainer:
    """Takes the rounds of one sequence as they are traced, and explains their tokens.

    It is the argument ``trace`` of a `SpeculativeDecoder` whose rule is token. Rounds of trees are
    not traced; `add_step` takes what they appended.

    Args:
        tokenizer: of the target.
        prompt: ids of the prompt, which decide how a token is written.
        drafter: name of the drafter.
        sampling: ``temperature``, ``top_k``, ``top_p``, ``min_p`` of the call, one number each.
    """

    tokenizer: Any
    prompt: Sequence[int]
    drafter: str
    sampling: dict[str, Any]
    rounds: list[list[Explained]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tokens = list(self.prompt)
        self._shown, self._unfinished = self._decoded(self._tokens), ""

    def __call__(self, traced: TracedRound) -> None:
        """Explain one round of a call of one sequence."""
        (step,) = traced.steps
        drafts = traced.draft_token_ids[0].tolist()
        size = drafts.index(-1) if -1 in drafts else len(drafts)
        compared = min(size, len(step.tokens))
        p = target_probs(traced.logits[0, : compared + 1], self.sampling).cpu()
        q = self._draft_rows(traced, compared, p.shape[-1])
        uniforms = acceptance_uniforms(
            traced.seeds, torch.from_numpy(traced.lengths), compared, traced.rule
        )
        random = self.sampling["temperature"] > 0
        said = []
        for i, (token, kind) in enumerate(zip(step.tokens, step.kinds, strict=True)):
            drafted: dict[str, Any] = {}
            if i < compared:
                drafted = {
                    "drafter": self.drafter,
                    "accept_prob": float(traced.accept_probs[0, i]),
                    "uniform": float(uniforms[0, i]) if random else None,
                }
            if kind == "recovered":
                rejected = drafts[i]
                said.append(
                    Explained(
                        rejected, self._text(rejected), "rejected", float(p[i, rejected]),
                        q=float(q[i, rejected]), unread=size - i - 1, **drafted,
                    )
                )  # fmt: skip
                residual = (p[i] - q[i]).clamp(min=0)
                drafted = {"residual": float(residual[token] / residual.sum())}
            if kind != "accepted" and random:
                place = torch.from_numpy(traced.lengths + i)
                drafted["uniform"] = float(draw_uniforms(traced.seeds, place))
            said.append(
                Explained(
                    token, self._append(token), kind, float(p[i, token]),
                    q=float(q[i, token]) if i < compared else None, **drafted,
                )
            )  # fmt: skip
        self.rounds.append(said)

    def add_step(self, step: Step) -> None:
        """Explain one round of trees: only the tokens that it appended, and P of each."""
        said = []
        for token, kind, logprob in zip(step.tokens, step.kinds, step.logprobs, strict=True):
            drafter = self.drafter if kind == "accepted" else ""
            probability = math.exp(logprob)
            said.append(Explained(token, self._append(token), kind, probability, drafter))
        self.rounds.append(said)

    def _draft_rows(self, traced: TracedRound, compared: int, vocab_size: int) -> Tensor:
        return draft_probs(traced.draft_token_ids.clamp(min=0), traced.distribution, vocab_size)[
            0, :compared
        ].cpu()

    def _append(self, token: int) -> str:
        text = self._text(token)
        self._tokens.append(token)
        whole = self._decoded(self._tokens)
        if whole.endswith(UNFINISHED):
            self._unfinished = whole[len(self._shown) :]
        else:
            self._shown, self._unfinished = whole, ""
        return text

    def _text(self, token: int) -> str:
        """What a token adds to the text so far. Bytes without their character are shown as �."""
        text = self._decoded([*self._tokens, token])[len(self._shown) :]
        added = text.removeprefix(self._unfinished)
        return added or text

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return text
