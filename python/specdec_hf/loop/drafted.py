"""The draft of a round and its verification: in a round, only this file tells chains from trees.

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

from specdec_hf.drafting.checks import cut_chains, propose_checked
from specdec_hf.drafting.context import Candidates
from specdec_hf.drafting.drafter import Draft, Rejections, Round
from specdec_hf.loop.commit import DraftCounts, Taken
from specdec_hf.loop.session import Session
from specdec_hf.loop.streaming import Step, TracedRound
from specdec_hf.rules import CUSTOM_RULE
from specdec_hf.runner.protocol import to_device, vocab_size_of
from specdec_kernels import (
    Rule,
    SampledDraft,
    Tree,
    TreeRule,
    TreeVerdict,
    Verdict,
    verify_chain,
    verify_tree,
)


class DraftedRound:
    """The draft of one round; without `propose` it is empty.

    Attributes:
        lengths: [B], committed tokens of each sequence when the round began.
        active: [B] bool, the sequences that had not ended then.
        tokens: [B, N] int64 on the target's device, -1 for absent drafts. Drafts behind an
            end-of-sequence token are absent.
        draft: what was proposed, checked; None where nothing was drafted.
        known: whether the call brought the drafts, and not the drafter; see known_drafts.py.
        predicted: [B] bool, for which sequences they are of its ``prediction``.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.lengths = session.history.lengths.copy()
        self.active = session.history.active.copy()
        size, device = (len(self.lengths), 0), session.device
        self.tokens = torch.empty(size, dtype=torch.int64, device=device)
        self.draft: Draft | None = None
        self.known, self.predicted = False, np.zeros(len(self.lengths), dtype=bool)

    def propose(self, limits: NDArray[np.int64]) -> None:
        """Ask the drafter for up to ``limits[b]`` tokens, or levels of a tree, and cut its draft.

        Whether a token is drafted depends on those before it, and not on itself.
        """
        session = self.session
        drafter, state, call = session.drafter, session.state, session.drafter_call
        assert drafter is not None
        assert state is not None
        assert call is not None
        draft = propose_checked(drafter, state, session.history.read_only(), limits, call)
        if draft is None:
            return
        tokens = draft.tokens
        if draft.parents is None:
            # The drafts of a sequence must not depend on the limits of the others in its batch.
            counts = session.length_policy.kept(draft, call)
            if not counts.any():
                return
            tokens = cut_chains(draft, counts)
        self.hold(draft, tokens)

    def hold(self, draft: Draft, tokens: torch.Tensor, *, known: bool = False) -> None:
        """Let the round have a draft, of which tokens [B, N] are verified."""
        session, self.known = self.session, known
        skipped = session.ids_without_position
        ends = [[*sorted(call.stopping.eos), *skipped] for call, _ in session.sequences.calls]
        tokens = without_drafts_behind_ends(tokens, draft.parents, ends, draft.depth)
        self.tokens, self.draft = tokens.to(session.device, non_blocking=True), draft

    def forward(self, run: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        """The target's logits [B, N+1, V] after the last committed token and after each draft.

        Or what ``run`` gives, in the place of the runner's forward of chains.
        """
        # The cache lacks the last committed token of every sequence, and at first the prompt.
        session, runner = self.session, self.session.runner
        missing = int((self.lengths - runner.lengths).max())
        last = session.history.last(missing)
        if not runner.rolls_back:
            # Its state goes on where a sequence has ended, as that of plain generation does.
            last[:, -1] = np.where(session.padding_fed > 0, session.call.stopping.pad, last[:, -1])
        tokens = to_device(last, session.device)
        size = self.tokens.shape[1]
        if size:
            drafts = self.tokens.clamp(0, vocab_size_of(session.model) - 1)
            tokens = torch.cat([tokens, drafts], dim=1)
        if self.draft is not None and self.draft.parents is not None:
            assert missing == 1, "a tree's mask is made for a root and its nodes only"
            return runner.forward_tree(tokens, self.lengths - 1, self.layout.parents)
        starts = self.lengths - missing
        if session.drafter is not None and session.drafter.needs.target_forward:
            assert session.state is not None
            logits = session.state.forward(tokens, starts, size + 1)
            if logits is not None:
                return logits
        return (run or runner.forward)(tokens, starts, size + 1)

    @property
    def distribution(self) -> SampledDraft | None:
        """The rows that the tokens were drawn from; None for deterministic drafts."""
        drawn = None if self.draft is None else self.draft.drawn
        return None if drawn is None else drawn.at(self.session.sampling.temperature)

    @cached_property
    def layout(self) -> Tree:
        """The draft as a tree on the target's device."""
        if self.draft is not None and self.draft.parents is not None:
            return Tree(self.tokens, self.draft.parents.to(self.tokens.device, non_blocking=True))
        above = torch.arange(-1, self.tokens.shape[1] - 1, device=self.tokens.device)
        return Tree(self.tokens, above.expand_as(self.tokens))

    def verify(self, logits: torch.Tensor, **allowed: torch.Tensor) -> Verdict | TreeVerdict:
        """The op's verdict; ``allowed`` may have a token_bitmask [B, N+1, ceil(V/32)]."""
        session = self.session
        given = {**session.sampling.to_dict(), **allowed, "seeds": session.sequences.seeds}
        given["positions"] = to_device(self.lengths, session.device)
        return (self._verify_tree if session.drafts_trees else self._verify_chain)(logits, **given)

    def _verify_chain(self, logits: torch.Tensor, **given: torch.Tensor) -> Verdict:
        session = self.session
        verify: Callable[..., Verdict] = verify_chain
        if session.options.ablate == "residual":
            from specdec_hf.extras.own_rule import verify_without_residual  # noqa: PLC0415  # rare

            verify = verify_without_residual
        elif session.rule == CUSTOM_RULE:
            verify = self._own_rule().verify_chain
        return verify(
            logits,
            self.tokens,
            self.distribution,
            rule=cast(Rule, session.rule),
            **session.plan.rule_parameters,
            **given,
            with_accept_probs=session.options.trace is not None,
        )

    def _verify_tree(self, logits: torch.Tensor, **given: torch.Tensor) -> TreeVerdict:
        session, draft = self.session, self.draft
        # Rules that draw from a distribution all draw from the target's where there is no tree.
        plain = draft is None and session.rule not in ("greedy", "match")
        own = session.rule == CUSTOM_RULE and not plain
        verify: Callable[..., TreeVerdict] = self._own_rule().verify_tree if own else verify_tree
        return verify(
            logits,
            self.layout,
            self.distribution,
            rule=cast(TreeRule, "target_only" if plain else session.rule),
            draft_rows=None if draft is None else draft.draft_rows,
            **({} if plain else session.plan.rule_parameters),
            **given,
            max_depth=0 if draft is None else draft.depth,
            with_accept_probs=True,
        )

    def keep_path(self, verdict: Verdict | TreeVerdict) -> None:
        """Move the accepted path of a tree together in the target's cache."""
        if self.draft is not None and isinstance(verdict, TreeVerdict):
            positions = to_device(self.lengths, self.session.device)
            self.session.runner.compact(positions, verdict.path)

    def to_read(
        self, verdict: Verdict | TreeVerdict | torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """What the host must read beside the verdict.

        The drafted ``tokens`` [B, N]; of trees their ``parents`` [B, N], the accepted ``path``, and
        which nodes the op ``reached`` [B, N]; and ``carried``, that of the `Draft`, if it has one.
        """
        read = {"tokens": self.tokens}
        if isinstance(verdict, TreeVerdict):
            read["parents"], read["path"] = self.layout.parents, verdict.path
            read["reached"] = ~verdict.accept_probs.isnan()
        if self.draft is not None and self.draft.carried is not None:
            read["carried"] = self.draft.carried.to(self.session.device)
        return read

    def traced(
        self, logits: torch.Tensor, verdict: Verdict | TreeVerdict, steps: list[Step]
    ) -> TracedRound:
        """The round for who traces it."""
        tree: dict[str, Any] = {}
        if self.draft is not None and isinstance(verdict, TreeVerdict):
            tree = {"parents": self.layout.parents, "path": verdict.path}
            tree["draft_rows"] = self.draft.draft_rows
        return TracedRound(
            self.session.rule, self.session.sequences.seeds, self.lengths, logits, self.tokens,
            self.distribution, verdict.accept_probs, steps,
            indices=np.flatnonzero(self.active).tolist(), **tree,
        )  # fmt: skip

    def _own_rule(self) -> Any:
        from specdec_hf.extras.own_rule import Verifier  # noqa: PLC0415  # rare

        session = self.session
        return Verifier(session.options.rule, session.history.active, session.sequences.numbers)

    def count(self, taken: Taken) -> DraftCounts:
        """How much was drafted for each sequence, up to the end of its text."""
        accepted, ends_in_draft = taken.num_accepted, taken.ends_in_draft
        if not self.session.drafts_trees:
            ids = taken.draft["tokens"]
            sizes = np.logical_and.accumulate(ids >= 0, axis=1).sum(axis=1)
            counts = np.where(ends_in_draft, accepted, sizes)
            chains = zip(ids, accepted, counts, strict=True)
            rejected = [ids[:count][n : n + 1].tolist() for ids, n, count in chains]
            return DraftCounts(counts, counts, counts, rejected, [[] for _ in ids])
        path, tokens = taken.draft["path"], taken.draft["tokens"]
        parents, reached = taken.draft["parents"], taken.draft["reached"]
        drafted = np.zeros(len(path), dtype=np.int64)
        depths, tried = drafted.copy(), drafted.copy()
        rejected = [[] for _ in path]
        trials: list[list[tuple[int, int | None]]] = [[] for _ in path]
        for b in np.flatnonzero(self.session.history.active).tolist():
            nodes, above = tokens[b].tolist(), parents[b].tolist()
            steps = path[b, : accepted[b]].tolist()
            end = tuple(nodes[n] for n in steps) if ends_in_draft[b] else None
            texts = _drafted_texts(nodes, above, end)
            drafted[b], depths[b] = len(texts) - 1, max(map(len, texts.values()))
            trials[b], rejected[b] = self._trials(steps, above, texts, reached[b])
            tried[b] = accepted[b] + bool(rejected[b])
        return DraftCounts(drafted, depths, tried, rejected, trials)

    def _trials(
        self,
        path: list[int],
        parents: list[int],
        texts: dict[int, tuple[int, ...]],
        reached: NDArray[np.int64],
    ) -> tuple[list[tuple[int, int | None]], list[int]]:
        """The trials along a path, and the tokens that were rejected behind it."""
        trials: list[tuple[int, int | None]] = []
        # These rules keep the children of equal siblings apart; others merge such siblings.
        apart = self.session.rule in ("traversal", CUSTOM_RULE)

        def family(node: int) -> int | tuple[int, ...]:
            return parents[node] if apart else texts[node][:-1]

        children: dict[int | tuple[int, ...], list[int]] = {}
        for n in texts:
            if n >= 0:
                children.setdefault(family(n), []).append(n)
        for node in path:
            trial = _tried(children[family(node)], texts, reached, node).index(node)
            trials.append((trial + 1, trial))
        # No sibling is left where the text ended with the last node.
        last = path[-1] if path else -1
        rejected = _tried(children.get(last if apart else texts[last], []), texts, reached, None)
        trials.append((len(rejected), None))
        return trials, list(dict.fromkeys(texts[n][-1] for n in rejected))

    def rows(self, taken: Taken) -> NDArray[np.int64]:
        """[B, n], the row of logits that each emitted token was chosen from."""
        if not self.session.drafts_trees:
            batch_size, size = taken.draft["tokens"].shape
            return np.broadcast_to(np.arange(size + 1), (batch_size, size + 1))
        # The root's row comes first, then those of the nodes.
        path = taken.draft["path"]
        return np.concatenate([np.zeros((len(path), 1), np.int64), path + 1], axis=1)

    def round(
        self, taken: Taken, candidates: Candidates | None, rejections: Rejections | None
    ) -> Round:
        """What became of the draft, with what `Needs` asked for."""
        # The state may write to what it is given.
        lengths, kept, active = self.lengths.copy(), taken.num_accepted.copy(), self.active.copy()
        tokens, carried = taken.draft["tokens"], taken.draft.get("carried")
        if self.known:  # the drafter proposed nothing
            none, kept = tokens[:, :0], np.zeros_like(kept)
            return Round(lengths, active, kept, none, none, none, candidates, rejections)
        if self.session.drafts_trees:
            path = taken.draft["path"]
            keeps = np.arange(path.shape[1]) < kept[:, None]
            path = np.where(keeps, path, -1)
            accepted = np.take_along_axis(tokens, np.maximum(path, 0), axis=1)
            accepted = np.where(keeps, accepted, -1)
        else:
            chain = Round.of_chain(lengths, active, kept, tokens)
            path, accepted = chain.path, chain.tokens
        carried = path[:, :0] if carried is None else carried
        return Round(lengths, active, kept, path, accepted, carried, candidates, rejections)


def without_drafts_behind_ends(
    tokens: torch.Tensor,
    parents: torch.Tensor | None,
    ends: list[list[int]],
    depth: int | None,
) -> torch.Tensor:
    """The drafted tokens [B, N], -1 where a token before one on its path ends the sequence.

    Plain decoding never reaches such a place, so nothing may be asked about it.

    Args:
        tokens: [B, N] of chains or trees, on any device; the host does not wait for it.
        parents: [B, N] of trees, None for chains.
        ends: for each sequence the tokens that end it.
        depth: of trees, how many levels count.
    """
    if not tokens.shape[1] or not any(ends):
        return tokens
    if tokens.device.type == "cpu":
        rows = zip(ends, tokens.tolist(), strict=True)
        if all(set(one).isdisjoint(row) for one, row in rows):
            return tokens
    most = max(map(len, ends))
    padded = np.array([one + [-2] * (most - len(one)) for one in ends])  # -2 is no draft
    ending = (tokens[:, :, None] == to_device(padded, tokens.device)[:, None]).any(dim=2)
    if parents is None:
        return tokens.masked_fill(ending.cumsum(dim=1) - ending.long() > 0, -1)
    # Column 0 is the root. Each step looks twice as far up as the one before it.
    above = torch.nn.functional.pad(
        parents.to(tokens.device).clamp(-1, tokens.shape[1] - 1) + 1, (1, 0)
    )
    behind = torch.nn.functional.pad(ending, (1, 0)).gather(1, above)
    for _ in range((depth or 1).bit_length()):
        behind |= behind.gather(1, above)
        above = above.gather(1, above)
    return tokens.masked_fill(behind[:, 1:], -1)


def _drafted_texts(
    tokens: list[int], parents: list[int], end: tuple[int, ...] | None
) -> dict[int, tuple[int, ...]]:
    """The tokens down to each present node; those of the root, -1, are none.

    Nodes behind the path of tokens ``end`` are absent, where a text ends with it.
    """
    texts: dict[int, tuple[int, ...]] = {-1: ()}
    for n, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token >= 0 and parent in texts and texts[parent] != end:
            texts[n] = (*texts[parent], token)
    return texts


def _tried(
    siblings: list[int],
    texts: dict[int, tuple[int, ...]],
    reached: NDArray[np.int64],
    accepted: int | None,
) -> list[int]:
    """The siblings that count as trials: those that the op compared, and of others each token once.

    Rule top_k_plus_one compares the last child first, and traversal the leaves alone; children
    before an accepted one then count without having been compared. A rule of the caller's own says
    of no node whether it was compared, and each counts.
    """
    if not reached.any():
        return siblings
    trials: list[int] = []
    for n in siblings:
        if n == accepted or reached[n] or texts[n] not in [texts[m] for m in trials]:
            trials.append(n)
    return trials
