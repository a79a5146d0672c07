"""How each token came about: who drafted it, P, Q, the uniform, and what was decided.

Kinds of tokens are those of `specdec_hf.loop.streaming`, and "rejected" for the draft at which a
round stopped. Nodes of a tree that the verification did not look at are "drafted" and no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from specdec_hf.cli.distributions import draft_probs, target_probs
from specdec_hf.detokenizer import INCOMPLETE, Detokenizer
from specdec_hf.drafting.call import reads_draft
from specdec_hf.loop.streaming import Kind, TracedRound
from specdec_kernels import RULES_READING_DRAFT
from specdec_kernels.analysis import acceptance_uniforms, draw_uniforms

CONTEXT = 16  # tokens before a node with which its text is decoded


@dataclass(frozen=True)
class Explained:
    """One token of a round; probabilities are those after the sampling parameters.

    Attributes:
        token, text: its id, and what it adds to the text.
        kind: how it came about.
        p: probability under the target, P.
        drafter: who drafted it; empty for recovered, bonus and plain tokens.
        q: probability under the drafter, Q, where something was drafted; 1 for a deterministic
            draft. Of a recovered token it is Q at the place of the rejected draft. None for sampled
            texts under rules that do not read Q.
        accept_prob: of a draft, which is accepted if the uniform is smaller; None for other tokens.
        uniform: what decided. That of a recovered, bonus or plain token drew it: it is the first
            token whose cumulative probability exceeds the uniform, in the order of ids. None at
            temperature 0, where nothing is random, under rules without one, and in trees.
        residual: probability of a recovered token under norm(max(P - Q, 0)), for rule token.
        unread: drafts after a rejected one, which the verification did not look at.
        position: index of the token in the sequence.
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
    position: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without those that do not apply."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


@dataclass(frozen=True)
class Node:
    """A node of a drafted tree.

    Attributes:
        token, text: its id, and what it adds to the text of its parent.
        parent: index of the parent among the nodes; -1 is the root.
        kind: "accepted", "rejected", or "drafted" where the verification did not look at it.
        p: probability under the target, after the tokens of its path.
        q: probability under the drafter; None for nodes that were not drawn.
        accept_prob: acceptance probability, given that the rule reached the node; None elsewhere.
    """

    token: int
    text: str
    parent: int
    kind: Literal["accepted", "rejected", "drafted"]
    p: float
    q: float | None = None
    accept_prob: float | None = None


@dataclass(frozen=True)
class ExplainedTree:
    """The tree of one round.

    Attributes:
        round: number of the round, from 1.
        position: index of the root's children in the sequence.
        root: text of the last committed token.
        nodes: each after its parent. Absent ones are left out. Nodes that spell the same path are
            one for the verification, except under rule traversal, and have the same kind then.
        last: index of the last node of the accepted path; -1 is the root.
        following: the recovered or bonus token; None where the text ended on the path.
    """

    round: int
    position: int
    root: str
    nodes: list[Node]
    last: int
    following: Explained | None

    @property
    def mask(self) -> list[list[bool]]:
        """What the root and each node attend to among themselves, [N+1][N+1]; the root is 0.

        All of them attend to the text before the root too.
        """
        rows = [[True] + [False] * len(self.nodes)]
        for n, node in enumerate(self.nodes):
            row = list(rows[node.parent + 1])
            row[n + 1] = True
            rows.append(row)
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        following = None if self.following is None else self.following.to_dict()
        return {**asdict(self), "following": following}


@dataclass
class Explainer:
    """Takes the rounds of one sequence as they are traced, and explains their tokens.

    It is the argument ``trace`` of a `SpeculativeDecoder`. Rounds of trees have an entry in
    ``trees`` too; in ``rounds`` they hold the accepted path, and the children of its last node
    where these were rejected.

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
    trees: list[ExplainedTree] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tokens = list(self.prompt)
        self._text = Detokenizer(self.tokenizer, self.prompt, skip_special_tokens=False)

    def __call__(self, traced: TracedRound) -> None:
        """Explain one round of a call of one sequence."""
        said = self._chain(traced) if traced.parents is None else self._tree(traced)
        self.rounds.append(said)

    @property
    def random(self) -> bool:
        """Whether the call samples."""
        return bool(self.sampling["temperature"] > 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rounds": [[token.to_dict() for token in said] for said in self.rounds],
            "trees": [tree.to_dict() for tree in self.trees],
        }

    def _chain(self, traced: TracedRound) -> list[Explained]:
        (step,) = traced.steps
        begin = int(traced.lengths[0])
        drafts = traced.draft_token_ids[0].tolist()
        size = drafts.index(-1) if -1 in drafts else len(drafts)
        compared = min(size, len(step.tokens))
        p = target_probs(traced.logits[0, : compared + 1], self.sampling).cpu()
        q = draft_probs(traced.draft_token_ids.clamp(min=0), traced.distribution, p.shape[-1])
        q = q[0, :compared].cpu()
        # Rules that do not read Q are not told what drafts were drawn from.
        knows_q = not self.random or reads_draft(traced.rule)
        uniforms = acceptance_uniforms(
            traced.seeds, torch.from_numpy(traced.lengths), compared, traced.rule
        )
        # Other rules compare no uniform, and those of trees belong to siblings.
        random = self.random and traced.rule in RULES_READING_DRAFT
        said = []
        for i, (token, kind) in enumerate(zip(step.tokens, step.kinds, strict=True)):
            drafted: dict[str, Any] = {}
            if i < compared:
                drafted = {
                    "drafter": self.drafter,
                    "accept_prob": _known(traced.accept_probs[0, i]),
                    "uniform": float(uniforms[0, i]) if random else None,
                }
            if kind == "recovered":
                rejected = drafts[i]
                said.append(
                    Explained(
                        rejected, self._added(rejected), "rejected", float(p[i, rejected]),
                        q=float(q[i, rejected]) if knows_q else None, unread=size - i - 1,
                        position=begin + i, **drafted,
                    )
                )  # fmt: skip
                drafted = {}
                if traced.rule == "token":
                    residual = (p[i] - q[i]).clamp(min=0)
                    drafted = {"residual": float(residual[token] / residual.sum())}
            if kind != "accepted" and random:
                place = torch.from_numpy(traced.lengths + i)
                drafted["uniform"] = float(draw_uniforms(traced.seeds, place))
            said.append(
                Explained(
                    token, self._append(token), kind, float(p[i, token]),
                    q=float(q[i, token]) if i < compared and knows_q else None,
                    position=begin + i, **drafted,
                )
            )  # fmt: skip
        return said

    def _tree(self, traced: TracedRound) -> list[Explained]:
        assert traced.parents is not None
        assert traced.path is not None
        (step,) = traced.steps
        begin = int(traced.lengths[0])
        *before, pending = self._tokens[-CONTEXT:]
        root = self._piece(before, [pending])
        p = target_probs(traced.logits[0], self.sampling).cpu()
        path = [n for n in traced.path[0].tolist() if n >= 0]
        nodes, places = self._nodes(traced, path, p)
        last = places[path[-1]] if path else -1
        said: list[Explained] = []
        for i, (token, kind) in enumerate(zip(step.tokens, step.kinds, strict=True)):
            if kind == "accepted":
                node = nodes[places[path[i]]]
                said.append(self._drafted(node, begin + i, self._append(token)))
                continue
            if kind == "recovered":
                ends = [-1] if i == 0 else _spelling(nodes, last)
                tried = {node.token: node for node in nodes if node.parent in ends}
                said += [self._drafted(tried[token], begin + i) for token in step.rejected]
            row = path[i - 1] + 1 if i else 0
            said.append(
                Explained(
                    token, self._append(token), kind, float(p[row, token]), position=begin + i
                )
            )
        following = said[-1] if said and step.kinds[-1] != "accepted" else None
        tree = ExplainedTree(len(self.rounds) + 1, begin, root, nodes, last, following)
        self.trees.append(tree)
        return said

    def _drafted(self, node: Node, position: int, text: str | None = None) -> Explained:
        """A node as a token of the text; the children of the last accepted node are rejected."""
        return Explained(
            node.token, node.text if text is None else text,
            "accepted" if node.kind == "accepted" else "rejected", node.p, self.drafter, node.q,
            node.accept_prob, position=position,
        )  # fmt: skip

    def _nodes(
        self, traced: TracedRound, path: list[int], p: Tensor
    ) -> tuple[list[Node], dict[int, int]]:
        """The present nodes, and where each of the round's nodes is among them; the root is -1."""
        assert traced.parents is not None
        tokens, parents = traced.draft_token_ids[0].tolist(), traced.parents[0].tolist()
        accept_probs, apart = traced.accept_probs[0].tolist(), traced.rule == "traversal"
        q = self._tree_q(traced, p.shape[-1])
        nodes: list[Node] = []
        place, paths = {-1: -1}, {-1: self._tokens[-CONTEXT:]}
        accepted = [[*paths[-1], *(tokens[m] for m in path[: d + 1])] for d in range(len(path))]
        for n, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if token < 0 or parent not in place:
                continue
            paths[n] = [*paths[parent], token]
            kind: Literal["accepted", "rejected", "drafted"] = "accepted"
            if n not in path and (apart or paths[n] not in accepted):
                kind = "drafted" if math.isnan(accept_probs[n]) else "rejected"
            nodes.append(
                Node(
                    token, self._piece(paths[parent], [token]), place[parent], kind,
                    float(p[parent + 1, token]), None if q is None else float(q[n]),
                    _known(accept_probs[n]),
                )
            )  # fmt: skip
            place[n] = len(nodes) - 1
        return nodes, place

    def _tree_q(self, traced: TracedRound, vocab_size: int) -> Tensor | None:
        """[N], Q of each node in the row that it was drawn from; None where nothing was drawn."""
        if traced.distribution is None or not self.random:
            return None
        count = traced.draft_token_ids.shape[1]
        if traced.distribution.temperature == 0:
            return torch.ones(count)
        rows = torch.arange(count) if traced.draft_rows is None else traced.draft_rows[0].cpu()
        some = traced.draft_token_ids[:, :1].clamp(min=0)
        q = draft_probs(some, traced.distribution, vocab_size)[0].cpu()
        drawn = traced.draft_token_ids[0].clamp(min=0).cpu()
        return q[rows.long().clamp(0, len(q) - 1), drawn]

    def _append(self, token: int) -> str:
        added = self._added(token)
        self._tokens.append(token)
        self._text.add(token)
        return added

    def _added(self, token: int) -> str:
        """What a token adds to the text so far. Bytes without their character are shown as �."""
        text, count = self._text, len(self._tokens) - len(self.prompt)
        before = text.rest()
        added = text.add(token) or text.rest()
        text.truncate(count)
        return added.removeprefix(before) or added

    def _piece(self, before: list[int], tokens: list[int]) -> str:
        """What tokens add to a text that ends with some others; � for a part of a character."""
        shown = self._decoded(before)
        known = shown.rstrip(INCOMPLETE)
        added = self._decoded([*before, *tokens]).removeprefix(known)
        for _ in range(len(shown) - len(known)):
            added = added.removeprefix(INCOMPLETE) or INCOMPLETE
        return added

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return text


def _spelling(nodes: list[Node], last: int) -> list[int]:
    """The accepted nodes as deep as one of them: they spell the same path."""
    depths = [0] * len(nodes)
    for n, node in enumerate(nodes):
        depths[n] = depths[node.parent] + 1 if node.parent >= 0 else 1
    return [n for n, x in enumerate(depths) if x == depths[last] and nodes[n].kind == "accepted"]


def _known(probability: Tensor | float) -> float | None:
    """A probability; None for NaN, where the rule has none."""
    return None if math.isnan(float(probability)) else float(probability)
