"""Medusa: residual blocks over the target's final hidden state, one stack for each head.

Source: Cai et al. 2024, arXiv 2401.10774, section 2.1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.arguments import shown
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import RULES_OF_DETERMINISTIC_TREES, Draft
from specdec_hf.drafting.sampling import mask_below_limits
from specdec_hf.heads.files import checked, checked_size, read_config, read_weights
from specdec_hf.heads.placed import HeadDrafter
from specdec_hf.runner.protocol import to_device
from specdec_hf.schedules.base import MAX_DRAFT_LENGTH
from specdec_hf.trees import TreeSpec
from torch import nn
from torch.nn import functional

from specdec_papers.parallel import (
    ParallelConfig,
    ParallelHeads,
    ParallelState,
    begin_vocabulary,
    read_parallel_config,
    write_parallel,
)


class MedusaHeads(ParallelHeads):
    """K stacks of residual blocks x + SiLU(W x + b).

    Args:
        config: its sizes.

    Attributes:
        weights: [blocks, K, H, H].
        biases: [blocks, K, H].
    """

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        size, shape = config.target_hidden_size, (config.inner, config.num_heads)
        self.weights = nn.Parameter(torch.zeros(*shape, size, size))
        self.biases = nn.Parameter(torch.zeros(*shape, size))

    def states(self, final: torch.Tensor) -> torch.Tensor:
        x = final[..., None, :].expand(*final.shape[:-1], self.config.num_heads, -1)
        for weights, biases in zip(self.weights, self.biases, strict=True):
            x = x + functional.silu(torch.einsum("...ki,koi->...ko", x, weights) + biases)
        return x

    def begin_as(self, model: Any) -> None:
        """Zero weights, so that every head first drafts what the target would say next."""
        with torch.no_grad():
            self.weights.zero_()
            self.biases.zero_()


# The best nodes of Medusa's product where the heads' tokens are right as often as in this table.
_RANKS = (4, 3, 2, 1, 1)
_ACCURACIES = ((0.5, 0.12, 0.06, 0.04), (0.3, 0.1, 0.05), (0.2, 0.08), (0.15,), (0.1,))
DEFAULT_TREE = TreeSpec.medusa(_RANKS, 12, _ACCURACIES)


MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"


def save_medusa(head: MedusaHeads, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write Medusa heads as `write_head` does, their output matrices only where these are own."""
    blocks = head.config.inner
    tensors = {}
    for k in range(head.config.num_heads):
        for block in range(blocks):
            tensors[f"{k}.{block}.linear.weight"] = head.weights[block, k]
            tensors[f"{k}.{block}.linear.bias"] = head.biases[block, k]
        if head.own_lm_head:
            tensors[f"{k}.{blocks}.weight"] = head.lm_head[k]
    fields = {"medusa_num_heads": head.config.num_heads, "medusa_num_layers": blocks}
    write_parallel(head, folder, fields, tensors, dtype, MEDUSA_WEIGHTS)


def load_medusa(folder: str | Path) -> MedusaHeads:
    """Medusa heads from a folder, in float32 on the host.

    There are as many as the file holds: the config of the heads that their authors published
    counts fewer.

    Raises:
        ValueError: a folder without heads, pickled ones, or ones whose config, names or shapes are
            wrong, by name.
    """
    folder = Path(folder)
    given, tensors = read_config(folder), read_weights(folder, MEDUSA_WEIGHTS)
    blocks = checked_size(given, "medusa_num_layers", maximum=max(len(tensors), 1))
    numbers = [int(name.partition(".")[0]) for name in tensors if name.partition(".")[0].isdigit()]
    heads = max(checked_size(given, "medusa_num_heads"), max(numbers, default=0) + 1)
    checked("medusa_num_heads", heads, maximum=MAX_DRAFT_LENGTH)
    own = f"0.{blocks}.weight" in tensors
    first = tensors.get("0.0.linear.weight", torch.empty(0))
    rows = tensors[f"0.{blocks}.weight"] if own else torch.empty(0)
    size = checked_size(given, "hidden_size", len(first) or 1)
    config = read_parallel_config(given, size, heads, blocks, tensors, len(rows))
    expected: dict[str, list[int]] = {}
    for k in range(heads):
        for block in range(blocks):
            expected[f"{k}.{block}.linear.weight"] = [size, size]
            expected[f"{k}.{block}.linear.bias"] = [size]
        if own:
            expected[f"{k}.{blocks}.weight"] = [config.draft_vocab_size, size]
    head = MedusaHeads(config)
    begin_vocabulary(head, tensors, expected, folder / MEDUSA_WEIGHTS)
    state = {}
    for name, part in (("weights", "weight"), ("biases", "bias")):
        of = [[tensors[f"{k}.{b}.linear.{part}"] for k in range(heads)] for b in range(blocks)]
        state[name] = torch.stack([torch.stack(block) for block in of]).float()
    head.load_state_dict(state)
    if own:
        head.lm_head = torch.stack([tensors[f"{k}.{blocks}.weight"] for k in range(heads)]).float()
        head.own_lm_head = True
    return head.eval()


class MedusaDrafter(HeadDrafter[MedusaHeads], entry="medusa"):
    """Trained heads, each of which offers its most likely tokens at one depth of a fixed tree.

    The rule of the source is typical, which is lossy and must be asked for.

    Args:
        head: `MedusaHeads`, or the folder of some. They are not changed.
        tree: shape, such as `TreeSpec.medusa` makes; None is one of 12 nodes.

    Raises:
        TypeError: no heads, or no tree.
        ValueError: a folder whose heads cannot be read, by name of what is wrong, or a tree that is
            deeper than the heads are many.

    Source: Cai et al. 2024, arXiv 2401.10774.
    """

    rules = RULES_OF_DETERMINISTIC_TREES
    kind, load = MedusaHeads, staticmethod(load_medusa)

    def __init__(self, head: MedusaHeads | str | Path, tree: TreeSpec | None = None) -> None:
        if not isinstance(tree, TreeSpec | None):
            raise TypeError(f"tree must be None or a TreeSpec, got {shown(tree)}")
        super().__init__(head)
        heads = self._head.head.config.num_heads
        self.tree = DEFAULT_TREE.cut(heads) if tree is None else tree
        if self.tree.depth > heads:
            raise ValueError(f"tree must be at most {heads} deep, got {self.tree.depth}")
        self.size, self.depth = self.tree.size, self.tree.depth

    def state_with(self, head: MedusaHeads, call: DrafterCall) -> ParallelState:
        return _MedusaState(head, call, self.tree)


class _MedusaState(ParallelState):
    def __init__(self, head: MedusaHeads, call: DrafterCall, tree: TreeSpec) -> None:
        super().__init__(head, call)
        self._tree = tree

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        limits = self.room(texts, limits)
        depth = int(limits.max())
        if depth < 1:
            return None
        spec, states = self._tree.cut(depth), self.states()
        depths, ranks = np.array(spec.depths), np.array(spec.ranks)
        levels = []
        for k in range(depth):
            here = to_device(ranks[depths == k + 1], states.device)
            levels.append(self.top(states, k, int(ranks[depths == k + 1].max()) + 1)[:, here])
        below = to_device(depths[None], states.device)
        tokens = mask_below_limits(torch.cat(levels, dim=1), below, limits)
        parents = to_device(np.array(spec.parents), states.device)
        return Draft(tokens, parents.expand(len(tokens), -1), depth=depth)
