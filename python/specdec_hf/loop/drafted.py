"""The draft of a round and its verification. In a round, only this file tells chains from trees.

A chain is a draft without parents. It is verified with `verify_chain`, and a tree, whose root is
the last committed token, with `verify_tree`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafting.checks import ask, cut_chains
from specdec_hf.drafting.drafter import Draft, DraftOutcome
from specdec_hf.loop.commit import DraftCounts, HostVerdict
from specdec_hf.loop.session import Session
from specdec_hf.runner.protocol import to_device, vocab_size_of
from specdec_hf.runner.spec_runner import SpecRunner
from specdec_kernels import Rule, Tree, TreeRule, TreeVerdict, Verdict, verify_chain, verify_tree

# These rules try siblings that hold the same token one after the other; multi_draft_wor does where
# they were drawn apart. For the other rules such siblings are one child.
RULES_TRYING_EQUAL_SIBLINGS = ("multi_draft", "multi_draft_wor", "k_seq", "traversal")


class Drafted:
    """The draft of one round; without `propose` it is empty.

    Attributes:
        lengths: [B], committed tokens of each sequence when the round began.
        counts: [B], tokens of each chain that are verified.
        tokens: [B, N] int64 on the target's device, -1 for absent drafts.
        draft: what the drafter proposed, checked; None where it drafted nothing.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.lengths = session.history.lengths.copy()
        self.counts = np.zeros_like(self.lengths)
        size, device = (len(self.lengths), 0), session.model.device
        self.tokens = torch.empty(size, dtype=torch.int64, device=device)
        self.draft: Draft | None = None

    def propose(self, limits: NDArray[np.int64]) -> None:
        """Ask the drafter for up to ``limits[b]`` tokens, or levels of a tree."""
        session = self.session
        assert session.drafter is not None
        assert session.context is not None
        draft = ask(session.drafter, session.history.shown(), limits, session.context)
        if draft is None:
            return
        tokens = draft.tokens
        if draft.parents is None:
            # The drafts of a sequence must not depend on the limits of the others in its batch.
            self.counts = session.length_policy.kept(draft, session.context)
            if not self.counts.any():
                return
            tokens = cut_chains(draft, self.counts)
            if session.call.encoded is not None:
                tokens = self._cut_at_padding(tokens)
        self.tokens, self.draft = tokens.to(session.model.device, non_blocking=True), draft

    def _cut_at_padding(self, tokens: torch.Tensor) -> torch.Tensor:
        """Chains end at a token of padding where the decoder takes positions from it."""
        encoded = self.session.call.encoded
        assert encoded is not None
        if encoded.padding_id is None:
            return tokens
        # Whether a token is drafted depends on those before it, and not on itself.
        last = to_device(self.session.history.last(1), tokens.device)
        before = torch.cat([last, tokens[:, :-1]], dim=1) == encoded.padding_id
        tokens = tokens.masked_fill(before.cumsum(dim=1) > 0, -1)
        if tokens.device.type == "cpu":
            self.counts = np.minimum(self.counts, (tokens >= 0).sum(dim=1).numpy())
        return tokens

    def forward(self) -> torch.Tensor:
        """The target's logits [B, N+1, V] after the last committed token and after each draft."""
        # The cache lacks the last committed token of every sequence, and at first the prompt.
        session, runner = self.session, self.session.runner
        missing = int((self.lengths - runner.lengths).max())
        last = session.history.last(missing)
        if runner.kind == "plain":
            # Its state goes on where a sequence has ended, as that of plain generation does.
            last[:, -1] = np.where(session.padding_fed > 0, session.call.pad, last[:, -1])
        tokens = to_device(last, session.model.device)
        size = self.tokens.shape[1]
        if size:
            drafts = self.tokens.clamp(0, vocab_size_of(session.model) - 1)
            tokens = torch.cat([tokens, drafts], dim=1)
        if self.draft is not None and self.draft.parents is not None:
            assert missing == 1, "a tree's mask is made for a root and its nodes only"
            assert isinstance(runner, SpecRunner)
            return runner.forward_tree(tokens, self.lengths - 1, self.layout.parents)
        starts = self.lengths - missing
        if session.drafter is not None and session.drafter.makes_forward:
            logits = session.drafter.forward(tokens, starts, size + 1)
            if logits is not None:
                return logits
        return runner.forward(tokens, starts, size + 1)

    @cached_property
    def layout(self) -> Tree:
        """The draft as a tree on the target's device."""
        if self.draft is not None and self.draft.parents is not None:
            return Tree(self.tokens, self.draft.parents.to(self.tokens.device, non_blocking=True))
        above = torch.arange(-1, self.tokens.shape[1] - 1, device=self.tokens.device)
        return Tree(self.tokens, above.expand_as(self.tokens))

    def verify(self, logits: torch.Tensor) -> tuple[Verdict | TreeVerdict, list[torch.Tensor]]:
        """The op's verdict, and what else the host must read."""
        session, draft = self.session, self.draft
        positions = to_device(self.lengths, session.model.device)
        distribution = None if draft is None else draft.distribution
        if not session.drafts_trees:
            verify: Callable[..., Verdict] = verify_chain
            if session.ablate == "residual":
                verify = verify_without_residual
            verdict: Verdict | TreeVerdict = verify(
                logits,
                self.tokens,
                distribution,
                rule=cast(Rule, session.rule),
                **session.sampling.to_dict(),
                **session.rule_parameters,
                seeds=session.seeds,
                positions=positions,
                with_accept_probs=session.trace is not None,
            )
            extra = [self.tokens]
        else:
            tree = self.layout
            # Rules that draw from a distribution all draw from the target's where there is no tree.
            plain = draft is None and session.rule not in ("greedy", "match")
            verdict = verify_tree(
                logits,
                tree,
                distribution,
                rule=cast(TreeRule, "target_only" if plain else session.rule),
                draft_rows=None if draft is None else draft.draft_rows,
                **session.sampling.to_dict(),
                **({} if plain else session.rule_parameters),
                seeds=session.seeds,
                positions=positions,
                max_depth=0 if draft is None else draft.depth,
                with_accept_probs=session.trace is not None,
            )
            extra = [verdict.path, tree.tokens, tree.parents]
            if draft is not None:
                assert isinstance(session.runner, SpecRunner)
                session.runner.compact(positions, verdict.path)
        carried = None if draft is None else draft.carried
        return verdict, extra if carried is None else [*extra, carried.to(session.model.device)]

    def count(self, verdict: HostVerdict) -> DraftCounts:
        """How much was drafted for each sequence."""
        if not self.session.drafts_trees:
            chains = zip(verdict.extra[0], verdict.num_accepted, self.counts, strict=True)
            after = (ids[:count][accepted : accepted + 1] for ids, accepted, count in chains)
            rejected = [ids[ids >= 0].tolist() for ids in after]
            return DraftCounts(self.counts, self.counts, self.counts, rejected)
        path, tokens, parents = verdict.extra[:3]
        drafted = np.zeros(len(path), dtype=np.int64)
        depths, tried = drafted.copy(), drafted.copy()
        rejected = [[] for _ in path]
        for b in np.flatnonzero(self.session.history.active).tolist():
            nodes, above = tokens[b].tolist(), parents[b].tolist()
            children, drafted[b], depths[b] = _children(nodes, above)
            accepted = int(verdict.num_accepted[b])
            taken = path[b, :accepted].tolist()
            rejected[b] = self._count_trials(b, taken, nodes, above, children)
            tried[b] = accepted + bool(rejected[b])
        return DraftCounts(drafted, depths, tried, rejected)

    def _count_trials(
        self,
        b: int,
        path: list[int],
        tokens: list[int],
        parents: list[int],
        children: dict[int, list[int]],
    ) -> list[int]:
        """Count the trials of the verification along a path.

        Returns:
            The tokens of the children of the last node, each once: all of them were rejected.
        """
        session, rule = self.session, self.session.rule
        stats = session.stats.sequences[session.numbers[b]]
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
                return list(dict.fromkeys(listed))
            token = tokens[node]
            trial = (
                siblings.index(node) if tries_equal else list(dict.fromkeys(listed)).index(token)
            )
            stats.record_trials(trial + 1, trial)
            members = [n for n in siblings if tokens[n] == token]
        return []

    def rows(self, verdict: HostVerdict) -> NDArray[np.int64]:
        """[B, n], the row of logits that each emitted token was chosen from."""
        if not self.session.drafts_trees:
            return np.broadcast_to(np.arange(verdict.tokens.shape[1]), verdict.tokens.shape)
        # The root's row comes first, then those of the nodes.
        path = verdict.extra[0]
        return np.concatenate([np.zeros((len(path), 1), np.int64), path + 1], axis=1)

    def outcome(self, verdict: HostVerdict, kept: NDArray[np.int64]) -> DraftOutcome:
        """What became of the draft, of which ``kept[b]`` tokens were committed."""
        # The drafter may write to what it is given.
        lengths, kept, extra = self.lengths.copy(), kept.copy(), list(verdict.extra)
        if self.session.drafts_trees:
            path, tokens = extra[:2]
            del extra[:3]
            keeps = np.arange(path.shape[1]) < kept[:, None]
            path = np.where(keeps, path, -1)
            taken = np.take_along_axis(tokens, np.maximum(path, 0), axis=1)
            taken = np.where(keeps, taken, -1)
        else:
            chain = DraftOutcome.of_chain(lengths, kept, verdict.tokens[:, :-1])
            path, taken = chain.path, chain.tokens
            del extra[0]
        carried = path[:, :0] if self.draft is None or self.draft.carried is None else extra[0]
        return DraftOutcome(lengths, kept, path, taken, carried)


def verify_without_residual(
    target: torch.Tensor, draft_token_ids: torch.Tensor, draft: Any, **arguments: Any
) -> Verdict:
    """`verify_chain` whose recovered token is drawn from P, as after a draft that ended there.

    Rule token decides draft i by the uniform of its position, so the second verification, which is
    shown the accepted drafts alone, accepts them again. Then it draws from P, as `verify_chain`
    does where there is no draft.
    """
    first = verify_chain(target, draft_token_ids, draft, **arguments)
    number = torch.arange(draft_token_ids.shape[1], device=draft_token_ids.device)
    accepted = draft_token_ids.masked_fill(number >= first.num_accepted[:, None], -1)
    second = verify_chain(target, accepted, draft, **arguments)
    return second._replace(status=first.status | second.status, accept_probs=first.accept_probs)


def _children(tokens: list[int], parents: list[int]) -> tuple[dict[int, list[int]], int, int]:
    """The children of each present node, the number of present nodes, and their largest depth."""
    depths = {-1: 0}
    children: dict[int, list[int]] = {}
    for n, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token >= 0 and parent in depths:
            depths[n] = depths[parent] + 1
            children.setdefault(parent, []).append(n)
    return children, len(depths) - 1, max(depths.values())
