"""A round whose drafts form a tree below the pending token, which is the tree's root."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.cache.forward import forward_tree, forward_window
from specdec_hf.cache.protocol import vocab_size_of
from specdec_hf.cache.spec_cache import SpecCache
from specdec_hf.decode.commit import DraftCounts, HostVerdict
from specdec_hf.decode.session import Session
from specdec_hf.drafters.checks import ask
from specdec_hf.drafters.tree_drafter import TreeDraft, TreeDrafter, TreeOutcome
from specdec_kernels import Tree, TreeRule, TreeVerdict, verify_tree

# These rules try siblings that hold the same token one after the other. For the other rules such
# siblings are one child.
RULES_TRYING_EQUAL_SIBLINGS = ("multi_draft", "k_seq", "traversal")


class TreeRound:
    """Drafts with a `TreeDrafter` and verifies with `verify_tree`; see `rounds.Round`."""

    def __init__(self, session: Session) -> None:
        assert isinstance(session.cache, SpecCache)
        assert isinstance(session.drafter, TreeDrafter)
        self.session = session
        self.cache = session.cache
        self.drafter = session.drafter
        self.lengths = session.history.lengths.copy()
        self.proposed: TreeDraft | None = None
        empty = torch.empty((len(self.lengths), 0), dtype=torch.int64, device=session.model.device)
        self.tree = Tree(empty, empty)

    def draft(self, limits: NDArray[np.int64]) -> None:
        s = self.session
        assert s.context is not None
        self.proposed = ask(self.drafter, s.history.shown(), limits, s.context)
        if self.proposed is not None:
            device = s.model.device
            self.tree = Tree(
                self.proposed.tokens.to(device, non_blocking=True),
                self.proposed.parents.to(device, non_blocking=True),
            )

    def forward(self) -> torch.Tensor:
        s, model = self.session, self.session.model
        missing = int((self.lengths - self.cache.lengths).max())
        last = torch.from_numpy(s.history.last(missing)).to(model.device, non_blocking=True)
        if self.proposed is None:
            return forward_window(model, self.cache, last, self.lengths - missing, keep=1)
        assert missing == 1, "a tree's mask is made for a root and its nodes only"
        vocab_size = vocab_size_of(model)
        tokens = torch.cat([last, self.tree.tokens.clamp(0, vocab_size - 1)], dim=1)
        return forward_tree(model, self.cache, tokens, self.lengths - 1, self.tree.parents)

    def layout(self) -> Tree:
        return self.tree

    def verify(self, logits: torch.Tensor) -> tuple[TreeVerdict, list[torch.Tensor]]:
        s, made, tree = self.session, self.proposed, self.tree
        positions = torch.from_numpy(self.lengths).to(s.model.device, non_blocking=True)
        # Rules that draw from a distribution all draw from the target's where there is no tree.
        plain = made is None and s.rule not in ("greedy", "match")
        verdict = verify_tree(
            logits,
            tree,
            None if made is None else made.distribution,
            rule=cast(TreeRule, "target_only" if plain else s.rule),
            draft_rows=None if made is None else made.draft_rows,
            **s.call.sampling.to_dict(),
            seeds=s.seeds,
            positions=positions,
            max_depth=0 if made is None else min(made.depth, tree.tokens.shape[1]),
        )
        extra = [verdict.path, tree.tokens, tree.parents]
        if made is not None:
            self.cache.compact(positions, verdict.path)
            extra += [] if made.carried is None else [made.carried.to(s.model.device)]
        return verdict, extra

    def count(self, verdict: HostVerdict) -> DraftCounts:
        path, tokens, parents = verdict.extra[:3]
        drafted = np.zeros(len(path), dtype=np.int64)
        depths, tried = drafted.copy(), drafted.copy()
        for b in np.flatnonzero(self.session.history.active).tolist():
            nodes, above = tokens[b].tolist(), parents[b].tolist()
            children, drafted[b], depths[b] = _children(nodes, above)
            accepted = int(verdict.num_accepted[b])
            taken = path[b, :accepted].tolist()
            tried[b] = accepted + self._count_trials(b, taken, nodes, above, children)
        return DraftCounts(drafted, depths, tried)

    def _count_trials(
        self,
        b: int,
        path: list[int],
        tokens: list[int],
        parents: list[int],
        children: dict[int, list[int]],
    ) -> bool:
        """Count the trials of the verification along a path.

        Returns:
            Whether the last node of the path has children, all of which were then rejected.
        """
        stats, rule = self.session.stats.sequences[b], self.session.rule
        tries_equal = rule in RULES_TRYING_EQUAL_SIBLINGS
        members = [-1]  # siblings with the token that was accepted last; the rule sees one node
        for above, node in zip([-1, *path], [*path, None], strict=True):
            if rule == "traversal":
                # Traversal keeps the subtrees of equal siblings apart, except where it is greedy.
                members = [above if node is None else parents[node]]
            siblings = sorted(n for m in members for n in children.get(m, ()))
            listed = [tokens[n] for n in siblings]
            if node is None:
                stats.record_trials(len(listed if tries_equal else set(listed)), None)
                return len(siblings) > 0
            token = tokens[node]
            trial = (
                siblings.index(node) if tries_equal else list(dict.fromkeys(listed)).index(token)
            )
            stats.record_trials(trial + 1, trial)
            members = [n for n in siblings if tokens[n] == token]
        return False

    def rows(self, verdict: HostVerdict) -> NDArray[np.int64]:
        # The root's row comes first, then those of the nodes.
        path = verdict.extra[0]
        return np.concatenate([np.zeros((len(path), 1), np.int64), path + 1], axis=1)

    def inform_drafter(self, verdict: HostVerdict, kept: NDArray[np.int64]) -> None:
        outcome = None
        if self.proposed is not None:
            path, tokens = verdict.extra[:2]
            keeps = np.arange(path.shape[1]) < kept[:, None]
            path = np.where(keeps, path, -1)
            carried = verdict.extra[3] if len(verdict.extra) > 3 else path[:, :0]
            accepted = np.take_along_axis(tokens, np.maximum(path, 0), axis=1)
            outcome = TreeOutcome(path, np.where(keeps, accepted, -1), carried)
        self.drafter.commit(self.lengths, outcome)


def _children(tokens: list[int], parents: list[int]) -> tuple[dict[int, list[int]], int, int]:
    """The children of each present node, the number of present nodes, and their largest depth."""
    depths = {-1: 0}
    children: dict[int, list[int]] = {}
    for n, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token >= 0 and parent in depths:
            depths[n] = depths[parent] + 1
            children.setdefault(parent, []).append(n)
    return children, len(depths) - 1, max(depths.values())
