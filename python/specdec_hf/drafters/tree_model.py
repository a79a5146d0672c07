"""Drafting a tree of fixed shape with one draft model, or with several that draft it in turn.

How the children of a node are drawn follows from the acceptance rule. Q is the draft distribution
of a node, after the sampling parameters.

- multi_draft, k_seq, traversal: the children are independent draws from Q.
- multi_draft_wor: they are drawn without replacement, each from Q without those before it.
- match: as multi_draft_wor, with the noise that the target will use at this position. The first
  child is then the draft model's own guess of the token that the target draws.
- top_k_plus_one: all but the last are the most likely tokens, and the last is drawn from Q without
  those.
- greedy, target_only: they are the most likely tokens; nothing is drawn.

Every child has noise of its own in every round: a rejected child influences what is emitted, so the
noise that drew it must not draw again at the same position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.composed import ComposedDrafter, candidates_for
from specdec_hf.drafters.growing_tree import (
    GrowingTreeDrafter,
    GrowingTreeState,
    call_for_tree,
)
from specdec_hf.drafters.model import DraftModel
from specdec_hf.drafting.call import NOTHING, DrafterCall, Drawn, reads_draft
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import (
    RULES_OF_DETERMINISTIC_TREES,
    Cost,
    Draft,
    Drafter,
    Round,
    State,
)
from specdec_hf.drafting.sampling import mask_below_limits
from specdec_hf.runner.protocol import to_device
from specdec_hf.trees import MAX_NODES, EagleTree, Forest, TreeSpec
from specdec_kernels import TREE_RULES_READING_DRAFT, expand_tree

# Rule "auto" is multi_draft_wor, and the other rules that read the draft precede those that do not.
RULES_OF_ONE_MODEL: tuple[str, ...] = tuple(
    dict.fromkeys(("multi_draft_wor", *TREE_RULES_READING_DRAFT, *RULES_OF_DETERMINISTIC_TREES))
)
# Siblings of several models have several distributions, for which these rules are not defined.
RULES_OF_ONE_DISTRIBUTION = ("top_k_plus_one", "k_seq")
RULES_OF_SEVERAL_MODELS = tuple(
    rule for rule in RULES_OF_ONE_MODEL if rule not in RULES_OF_ONE_DISTRIBUTION
)


class TreeModelDrafter(Drafter):
    """Each draft model drafts a whole tree, level by level, with one forward a level.

    How children are drawn follows the acceptance rule; see `draw_children`. The trees of several
    models (SpecInfer) hang below one root, and each node keeps the distribution it was drawn from.

    Args:
        drafters: the draft models, with sampling parameters of their own where they have some, and
            cascades with one (`Drafter.is_model`); made for their target.
        spec: the tree that each of them drafts.

    Attributes:
        models: all of them.
        drafters: the cascades.
        forest: their trees.

    Raises:
        ValueError: a rank too large for `expand_tree`, or too many nodes.
    """

    name = "model"

    def __init__(self, drafters: Sequence[Any], spec: TreeSpec) -> None:
        if max(spec.ranks) >= MAX_WIDTH:
            raise ValueError(f"ranks of tree must be below {MAX_WIDTH}, got {max(spec.ranks)}")
        if len(drafters) * spec.size > MAX_NODES:
            raise ValueError(
                f"tree must have at most {MAX_NODES} nodes over all draft models, "
                f"got {spec.size} for each of {len(drafters)}"
            )
        self.models = list(drafters)
        self.forest = Forest(spec, len(self.models))
        self.size, self.depth = self.forest.spec.size, spec.depth
        self.rules = RULES_OF_ONE_MODEL if len(self.models) == 1 else RULES_OF_SEVERAL_MODELS
        self.drafters = [one for one in self.models if isinstance(one, ComposedDrafter)]
        self.needs = candidates_for(self.drafters)
        if len(self.drafters) == len(self.models):
            self.name = self.models[0].name

    def check_tokenizer(self, tokenizer: Any) -> list[str]:
        return [note for one in self.drafters for note in one.check_tokenizer(tokenizer)]

    def begin(self, call: DrafterCall) -> State:
        """Check vocabularies and make empty caches.

        Raises:
            ValueError: a draft model that does not fit; see `DraftModel`.
        """
        return TreeModelState(self, call)


class TreeModelState(State):
    """The draft models of a `TreeModelDrafter` in a call."""

    def __init__(self, drafter: TreeModelDrafter, call: DrafterCall) -> None:
        self.drafter, self.call, self.forest = drafter, call, drafter.forest
        depth = drafter.depth
        self.steppers = [one.tree_model(call, depth, n) for n, one in enumerate(drafter.models)]
        self.cost = Cost(sum(stepper.cost.relative for stepper in self.steppers))
        owners, numbers = np.array(self.forest.owners), np.array(self.forest.numbers)
        copies = range(len(drafter.models))
        self._nodes = [np.flatnonzero(owners == copy) for copy in copies]
        # Only nodes with children are fed to their model; these are their places in its cache.
        fed = _feeding_order(self.forest.tree)
        self._fed = [np.where(owners == copy, fed[numbers], -1) for copy in copies]

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        batch_size, depth = len(limits), int(limits.max())
        spec = self.forest.spec.cut(depth)
        target = self.call.device
        tokens = torch.full((batch_size, spec.size), -1, dtype=torch.int64, device=target)
        draft_rows = np.zeros(spec.size, dtype=np.int32)
        levels: list[Children] = []
        offset = 0
        for stepper, nodes in zip(self.steppers, self._nodes, strict=True):
            room = stepper.room(texts, limits)
            if not room.any():
                continue
            tree = self.forest.tree.cut(int(room.max()))
            mine = nodes[: tree.size]
            made = draft_tree(stepper, tree, mine, texts)
            columns = to_device(mine, target)
            depths = to_device(np.array(tree.depths)[None], stepper.device)
            drafted = torch.cat([level.tokens for level in made], dim=1)
            tokens[:, columns] = mask_below_limits(drafted, depths, room).to(target)
            # Row 0 of a model's distributions is the root's; those of its inner nodes follow.
            row_of = np.concatenate([[0], _feeding_order(tree) + 1])
            draft_rows[mine] = offset + row_of[np.array(tree.parents) + 1]
            offset += int(row_of.max()) + 1
            levels += made
        if not levels:
            return None
        parents = to_device(np.array(spec.parents), target)
        proposed = Draft(tokens, parents.expand(batch_size, -1), depth=depth)
        if reads_draft(self.call.rule):
            drawn = [level.drawn for level in levels if level.drawn is not None]
            proposed.drawn = Drawn.join(drawn, target)
            rows = to_device(draft_rows, target)
            proposed.draft_rows = rows.expand(batch_size, -1)
        return proposed

    def commit(self, texts: History, done: Round) -> None:
        for stepper, fed in zip(self.steppers, self._fed, strict=True):
            stepper.learn(texts, done)
            stepper.keep(done.lengths, np.where(done.path >= 0, fed[done.path], -1))

    def end(self, texts: History) -> None:
        for stepper in self.steppers:
            stepper.end(texts)


def draft_tree(
    stepper: DraftModel, spec: TreeSpec, numbers: NDArray[np.int64], texts: History
) -> list[Children]:
    """Draw a whole tree level by level.

    Args:
        stepper: the draft model; the nodes that have children are in its cache afterwards.
        spec: the tree.
        numbers: [N] of its nodes among all nodes of the round, for their noise.
        texts: the committed tokens.

    Returns:
        The children that were drawn at depth 1, 2, ...
    """
    lengths, fed = texts.lengths, _feeding_order(spec)
    parents, depths = np.array(spec.parents), np.array(spec.depths)
    inner = np.flatnonzero(fed >= 0)
    # The root is -1 in both numberings.
    above = to_device(np.where(parents >= 0, fed[parents], -1)[inner], stepper.device)
    above = above.expand(len(lengths), -1)
    logits = stepper.catch_up(texts)[:, None]
    levels: list[Children] = []
    count = 0
    for depth in range(1, spec.depth + 1):
        nodes = np.flatnonzero(depths == depth)
        widths = np.unique(parents[nodes], return_counts=True)[1]
        made = draw_children(stepper, texts, logits, depth, widths, numbers[nodes], spec, nodes)
        levels.append(made)
        here = inner[depths[inner] == depth]
        if len(here):
            count += len(here)
            columns = to_device(here - nodes[0], stepper.device)
            logits = stepper.feed(made.tokens[:, columns], lengths, above[:, :count])
    return levels


def _feeding_order(spec: TreeSpec) -> NDArray[np.int64]:
    """[N], number of each node among those that have children, -1 for leaves."""
    order = np.full(spec.size, -1, dtype=np.int64)
    inner = sorted({parent for parent in spec.parents if parent >= 0})
    order[inner] = np.arange(len(inner))
    return order


MAX_WIDTH = 64  # most children of a node that expand_tree selects
WITHOUT_REPLACEMENT = ("multi_draft_wor", "match")
UNFILTERED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass
class Children:
    """The children of the m nodes of one level that have any.

    Attributes:
        tokens: [B, C] int64, all children of the first node, then those of the second, and so on;
            -1 where Q had no token left to draw.
        drawn: the first child of each node, and the rows [B, m, V] of the nodes' Q; None where
            nothing was drawn from them.
    """

    tokens: torch.Tensor
    drawn: Drawn | None


def draw_children(
    stepper: DraftModel,
    texts: History,
    logits: torch.Tensor,
    depth: int,
    widths: NDArray[np.int64],
    numbers: NDArray[np.int64],
    spec: TreeSpec,
    nodes: NDArray[np.int64],
) -> Children:
    """Draw one level of a tree.

    Args:
        stepper: the draft model; its call names the rule.
        texts: the committed tokens.
        logits: [B, m, V] of the nodes that get children.
        depth: of the children.
        widths: [m] number of children of each node, at least 1.
        numbers: [C] of the children among all nodes of the round, for their noise.
        spec, nodes: the tree, and [C] which of its nodes the children are.
    """
    rule = stepper.call.rule
    firsts = np.cumsum(widths) - widths
    if not reads_draft(rule) and rule != "match":
        ranks = np.array(spec.ranks)[nodes]
        tokens = _most_likely(logits, int(ranks.max()) + 1)
        owners = np.repeat(np.arange(len(widths)), widths)
        return Children(_pick(tokens, owners, ranks), None)
    level = _Level(stepper, texts, logits, depth, numbers)
    first_draw = level.draw(logits, firsts)
    columns: dict[int, torch.Tensor] = {}

    def put(parents: NDArray[np.int64], k: int, tokens: torch.Tensor) -> None:
        """Set child ``k`` of these nodes."""
        columns.update(zip((firsts[parents] + k).tolist(), tokens.unbind(dim=1), strict=True))

    put(np.arange(len(widths)), 0, first_draw.tokens)
    several = np.flatnonzero(widths > 1)
    if len(several) and (rule in WITHOUT_REPLACEMENT or rule == "top_k_plus_one"):
        level.begin_removal(first_draw, several)
    if rule == "top_k_plus_one":
        for width in np.unique(widths[several]).tolist():
            parents = np.flatnonzero(widths == width)
            top = _most_likely(_rows(logits, parents), width - 1)
            for k in range(width - 1):
                put(parents, k, top[:, :, k])
            level.remove(parents, top)
            put(parents, width - 1, level.draw_remaining(parents, firsts[parents] + width - 1))
    else:
        if len(several) and rule in WITHOUT_REPLACEMENT:
            level.remove(several, _rows(first_draw.tokens, several)[..., None])
        for k in range(1, int(widths.max())):
            parents = np.flatnonzero(widths > k)
            children = firsts[parents] + k
            if rule in WITHOUT_REPLACEMENT:
                put(parents, k, level.draw_remaining(parents, children))
            else:
                put(parents, k, level.draw(_rows(logits, parents), children).tokens)
    tokens = torch.stack([columns[c] for c in range(len(numbers))], dim=1)
    return Children(tokens, first_draw)


@dataclass
class _Level:
    """The nodes of one level that get children, and their Q without the tokens drawn so far."""

    stepper: DraftModel
    texts: History
    logits: torch.Tensor
    depth: int
    numbers: NDArray[np.int64]

    def draw(
        self,
        rows: torch.Tensor,
        children: NDArray[np.int64],
        sampling: Mapping[str, Any] = NOTHING,
    ) -> Drawn:
        """Draw these children, each from its row [B, c, V] and with noise of its own."""
        return self.stepper.call.draw(
            self.texts, rows, self.numbers[children], depth=self.depth,
            sampling={**self.stepper.sampling, **sampling},
        )  # fmt: skip

    def begin_removal(self, first_draw: Drawn, parents: NDArray[np.int64]) -> None:
        """Set up the logits from which tokens are removed: those that pass the filters."""
        threshold = first_draw.threshold
        stepper = self.stepper
        temperature = stepper.call.sampling_on(stepper.device)["temperature"]
        if isinstance(temperature, torch.Tensor):
            # At temperature 0 the threshold is the maximum, which would leave a single child. The
            # children of greedy sequences are the most likely tokens instead.
            threshold = threshold.masked_fill((temperature == 0)[:, None], -torch.inf)
        elif temperature == 0:
            threshold = torch.full_like(threshold, -torch.inf)
        rows = _rows(self.logits, parents)
        self.parents = parents
        self.remaining = rows.masked_fill(rows < _rows(threshold, parents)[..., None], -torch.inf)

    def remove(self, parents: NDArray[np.int64], tokens: torch.Tensor) -> None:
        """Take tokens [B, c, t] out of the distributions of these nodes."""
        at = to_device(np.searchsorted(self.parents, parents), tokens.device)
        sequences = torch.arange(len(tokens), device=tokens.device)[:, None, None]
        # A draw is -1 where no token remains. Removing token 0 there changes nothing.
        self.remaining[sequences, at[None, :, None], tokens.clamp(min=0)] = -torch.inf

    def draw_remaining(
        self, parents: NDArray[np.int64], children: NDArray[np.int64]
    ) -> torch.Tensor:
        """[B, c], draw one child of each of these nodes and remove it from their distributions."""
        rows = _rows(self.remaining, np.searchsorted(self.parents, parents))
        drawn = self.draw(rows, children, UNFILTERED).tokens
        self.remove(parents, drawn[..., None])
        return drawn


def _rows(x: torch.Tensor, nodes: NDArray[np.int64]) -> torch.Tensor:
    """x [B, m, ...] at some of the m nodes; a view where they are all of them."""
    if len(nodes) == x.shape[1]:
        return x
    return x[:, to_device(nodes, x.device)]


def _most_likely(logits: torch.Tensor, width: int) -> torch.Tensor:
    """[B, m, width], the most likely tokens of each row; ties go to the smaller id."""
    scores = torch.zeros(logits.shape[:2], dtype=torch.float32, device=logits.device)
    return expand_tree(logits, scores, width=width).tokens


def _pick(
    tokens: torch.Tensor, owners: NDArray[np.int64], ranks: NDArray[np.int64]
) -> torch.Tensor:
    """[B, C], the token of each child among those [B, m, K] of the node that owns it."""
    return tokens[:, to_device(owners, tokens.device), to_device(ranks, tokens.device)]


class ModelTreeDrafter(GrowingTreeDrafter):
    """A draft model whose trees grow along the likeliest paths, as those of EAGLE-2 do.

    Args:
        model: the draft model. Neither it nor its configs are changed.
        layout: size of the tree.
        draft_weights: see `DraftModel`.
    """

    name = "model"

    def __init__(self, model: Any, layout: EagleTree, draft_weights: str) -> None:
        super().__init__(layout)
        self.model, self.draft_weights = model, draft_weights

    def begin(self, call: DrafterCall) -> State:
        """Check the vocabulary and make an empty cache.

        Raises:
            ValueError: a draft model that does not fit; see `DraftModel`.
        """
        stepper = DraftModel(
            self.model, call_for_tree(call, self.layout), "spec", tree=True,
            draft_weights=self.draft_weights,
        )  # fmt: skip
        return GrowingTreeState(call, self.layout, stepper)
