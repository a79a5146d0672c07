"""What a drafter is told of the call that it drafts for, and the one way to draw from logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafting.context import CommittedStates, History
from specdec_hf.request.sampling import Sampling
from specdec_hf.runner.forwards import Borrower, CompileStats
from specdec_hf.runner.packed.model import PackedStats
from specdec_hf.runner.protocol import to_device
from specdec_hf.schedules.base import TokenStats
from specdec_kernels import (
    RULES_READING_DRAFT,
    TREE_RULES_READING_DRAFT,
    SampledDraft,
    sample,
)

if TYPE_CHECKING:
    from specdec_hf.extras.encoder import EncoderSource

MAX_DRAFTS_PER_ROUND = 2**16  # drafts of one drafter in one round
NOTHING: Mapping[str, Any] = MappingProxyType({})


def reads_draft(rule: str) -> bool:
    """Whether a rule compares the target's probabilities with those of the draft distribution."""
    return rule in RULES_READING_DRAFT or rule in TREE_RULES_READING_DRAFT


@dataclass(frozen=True, eq=False)
class Drawn:
    """Tokens that `DrafterCall.draw` drew, and the rows that it drew them from.

    Attributes:
        tokens: [B, m] int64; -1 where a row is not finite.
        logits: [B, m, V]; the draft distribution is their softmax at the call's temperature, above
            the threshold.
        logsumexp, threshold: [B, m], as `specdec_kernels.sample` returns them.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    logsumexp: torch.Tensor
    threshold: torch.Tensor

    @classmethod
    def join(cls, parts: Sequence[Drawn], device: torch.device) -> Drawn:
        """The rows of several draws one after the other, on one device."""
        held: dict[str, torch.Tensor] = {}
        for name in ("tokens", "logits", "logsumexp", "threshold"):
            values = [getattr(one, name).to(device) for one in parts]
            held[name] = torch.cat(values, dim=1) if len(values) > 1 else values[0]
        return cls(**held)

    @classmethod
    def one_hot(cls, tokens: torch.Tensor, vocab_size: int) -> Drawn:
        """The rows of deterministic drafts [B, n]; an absent draft, -1, gets that of token 0."""
        shape, device = tokens.shape, tokens.device
        logits = torch.full((*shape, vocab_size), -torch.inf, device=device)
        logits.scatter_(2, tokens.clamp(min=0)[..., None], 0.0)
        sums = torch.zeros(shape, dtype=torch.float64, device=device)
        return cls(tokens, logits, sums, torch.full(shape, -torch.inf, device=device))

    def at(self, temperature: float | torch.Tensor) -> SampledDraft:
        """As the ops take it, at the call's temperature."""
        return SampledDraft(self.logits, self.logsumexp, self.threshold, temperature)


@dataclass(frozen=True, eq=False)
class Forwards:
    """How the models and heads of a drafter run, and where they report it.

    Attributes:
        self_check: whether a draft model's cache is checked before its first use.
        compile: see `generate`.
        compiled: what that did for each of them; None where nobody asks.
        packed: what was packed for each of them; None where nobody asks.
        borrower: the call, which has CUDA graphs until it ends; None where nothing says when.
    """

    self_check: bool = True
    compile: bool | None = None
    compiled: list[CompileStats] | None = None
    packed: list[PackedStats] | None = None
    borrower: Borrower | None = None


@dataclass(frozen=True, eq=False)
class Asks:
    """What a state may ask the schedule of its call; None where the schedule does not answer.

    Attributes:
        continue_drafting: for states that draw token by token. It takes the index of the token
            drawn last and its `TokenStats`, and says for each sequence [B] whether to draw another
            one. A token is never taken back. Token statistics cost a read from the device each.
        nodes: `Schedule.nodes`, for trees on the host whose drafts no rule reads. None takes all
            nodes.
    """

    continue_drafting: Callable[[int, TokenStats], NDArray[np.bool_]] | None = None
    nodes: Callable[[int, NDArray[np.float64]], int] | None = None


@dataclass(frozen=True, eq=False)
class DrafterCall:
    """One call, as `Drafter.begin` is told of it. A state keeps it, and may change nothing of it.

    Attributes:
        model: the target.
        rule: acceptance rule of the call.
        sampling: parameters of the call: numbers, or tensors [B] on the target's device.
        seeds: [B] int64 on the target's device.
        max_length: no sequence will hold more tokens than this.
        max_draft: no round will ask for more tokens than this.
        note: leaves a remark in the statistics, with the number of the round. A remark that was
            left before is left out.
        forwards: how models run.
        encoder: what the encoder of an encoder-decoder read, or None. `EncoderSource.texts` gives
            its ids, to copy from, and `EncoderSource.encode` what another encoder makes of it.
        runner: that of the target. Only a drafter that computes a part of the target's forward may
            use it; see `Needs.target_forward`.
        asks: what the schedule answers.
        num_proposals: how many chains of each sequence a drafter with `Drafter.several` may draft.
        first_draft_index: index of this drafter's first draft in the round.
        kept_states: what `keep_states` keeps; None where the loop records none.
    """

    model: Any
    rule: str
    sampling: Sampling
    seeds: torch.Tensor
    max_length: int
    max_draft: int
    note: Callable[[str], None] = field(default=lambda text: None)
    forwards: Forwards = Forwards()
    encoder: EncoderSource | None = None
    runner: Any = None
    asks: Asks = Asks()
    num_proposals: int = 1
    first_draft_index: int = 0
    kept_states: list[CommittedStates] | None = None

    @classmethod
    def of(cls, model: Any, rule: str, parameters: Mapping[str, Any], **rest: Any) -> DrafterCall:
        """A call with sampling parameters by name, of which none is left out."""
        return cls(model, rule, Sampling(**parameters), **rest)

    @cached_property
    def _placed(self) -> dict[torch.device, dict[str, Any]]:
        """What `sampling_on` has given."""
        return {}

    @cached_property
    def device(self) -> torch.device:
        """The target's, of which Transformers looks for a parameter each time."""
        device: torch.device = self.model.device
        return device

    @property
    def batch_size(self) -> int:
        """The number of sequences B."""
        return len(self.seeds)

    def take(self, b: int, other: DrafterCall, index: int) -> None:
        """Let sequence ``b`` have what another call says of its sequence ``index``."""
        self.seeds[b] = other.seeds[index]
        for name, values in self.sampling.to_dict().items():
            values[b] = getattr(other.sampling, name)[index]
        self._placed.clear()

    def sampling_on(self, device: torch.device) -> dict[str, Any]:
        """The sampling parameters and ``seeds`` as keyword arguments of the ops on a device."""
        placed = self._placed
        if device not in placed:
            held = {**self.sampling.to_dict(), "seeds": self.seeds}
            placed[device] = {
                name: value.to(device) if isinstance(value, torch.Tensor) else value
                for name, value in held.items()
            }
        return dict(placed[device])

    def draw(
        self,
        texts: History,
        logits: torch.Tensor,
        index: int | Sequence[int] | NDArray[np.int64],
        *,
        depth: int | None = None,
        sampling: Mapping[str, Any] = NOTHING,
    ) -> Drawn:
        """Draw one token from each row of logits, with the noise of the round.

        That is the only way to a draft distribution. The noise follows from the seed of a sequence,
        its length and the number of the draft; under rule match it is that of the token's position.
        See docs/rules.md#noise.

        Args:
            texts: what `State.propose` was given.
            logits: [B, m, V] on any device.
            index: which draft of the round is drawn, from 0, or m of them. Drafts that are drawn in
                one round have different indices.
            depth: for a tree, how deep below the pending token these drafts are, from 1; index
                + 1, as in a chain, where it is not given.
            sampling: parameters in the place of those of the call.

        Raises:
            ValueError: logits of another shape; an index outside [0, 65536), or one that was drawn
                for these texts before, whose noise would come again.
        """
        indices = np.atleast_1d(np.asarray(index))
        shape, expected = list(logits.shape), [self.batch_size, indices.size]
        if len(shape) != 3 or shape[:2] != expected:
            wanted = f"[{self.batch_size}, {indices.size}, V], a row for each index"
            raise ValueError(f"logits must be {wanted}, got {shape}")
        if indices.dtype.kind not in "iu" or not (
            0 <= indices.min(initial=0) <= indices.max(initial=0) < MAX_DRAFTS_PER_ROUND
        ):
            raise ValueError(
                f"index must be integers in [0, {MAX_DRAFTS_PER_ROUND}), got {index!r}"
            )
        indices = indices.astype(np.int64)
        self.draw_once(texts, indices.tolist())
        positions = self._noise_positions(texts, indices, depth, logits.device)
        rows = logits.shape[1]
        given: dict[str, Any] = {
            name: value.repeat_interleave(rows) if isinstance(value, torch.Tensor) else value
            for name, value in {**self.sampling_on(logits.device), **sampling}.items()
        }
        drawn = sample(
            logits.flatten(0, 1), **given, positions=positions.flatten(),
            noise="shared" if self.rule == "match" else "draft",
        )  # fmt: skip
        tokens, _, sums, threshold, _ = (x.view(-1, rows) for x in drawn)
        return Drawn(tokens, logits, sums, threshold)

    def draw_once(self, texts: History, indices: list[int]) -> None:
        """Raise ValueError where noise of the round would draw a second time."""
        drawn = texts.drawn.setdefault(id(self), set())
        again = drawn.intersection(indices) or len(indices) - len(set(indices))
        if self.rule != "match" and again:
            raise ValueError(
                "index must be another one for each draft of a round, because the noise of an "
                f"index draws once, got {indices} after {sorted(drawn)}"
            )
        drawn.update(indices)

    def _noise_positions(
        self,
        texts: History,
        indices: NDArray[np.int64],
        depth: int | None,
        device: torch.device,
    ) -> torch.Tensor:
        """[B, m] int64, the ``positions`` of `sample`; see docs/rules.md#noise."""
        lengths = texts.lengths_on(device)
        if self.rule != "match":
            offsets = (self.first_draft_index + indices + 1) << 32
        else:
            offsets = indices if depth is None else np.full_like(indices, depth - 1)
        if len(offsets) == 1:
            return (lengths + int(offsets[0]))[:, None]
        return lengths[:, None] + to_device(offsets, device)

    def sampled_seeds(self) -> dict[int, int]:
        """The call's seed of each sequence that is sampled, by its number; reads the device."""
        temperature, device = self.sampling.temperature, self.seeds.device
        given = torch.as_tensor(temperature, dtype=torch.float32, device=device)
        pairs = zip(self.seeds.tolist(), given.expand(self.batch_size).tolist(), strict=True)
        return {b: seed for b, (seed, temperature) in enumerate(pairs) if temperature > 0}

    def keep_states(self, layers: Sequence[int]) -> CommittedStates:
        """Keep the target's hidden states of every committed token from now on.

        Args:
            layers: after how many layers they are read; 0 is the embeddings.

        Raises:
            ValueError: the drafter does not draft for the model of a call, whose forwards give
                them.
        """
        if self.runner is None or self.kept_states is None:
            raise ValueError(
                "a drafter that reads hidden states must draft for the model of a call itself, not "
                "inside a cascade, for a beam search or in a server"
            )
        self.runner.tap.open(layers)
        self.kept_states.append(CommittedStates(layers, self.runner.lengths))
        return self.kept_states[-1]

    def report_compiled(self, name: str, stats: CompileStats) -> None:
        """Add what ``compile`` did for a draft model or a head to the statistics of the call."""
        if self.forwards.compiled is not None:
            self.forwards.compiled.append(stats)
        if stats.eager:
            self.note(f"{name} runs eagerly: {stats.eager}")
