"""A draft model whose tokens a smaller drafter drafts: chains and trees.

In chains the draft model verifies the smaller drafter's tokens, and the target those that were
verified. A verified token follows the draft model's distribution exactly: after a rejection it is
drawn from the residual, not from the draft model. So the reported rows are those of the draft
model, as if it had drawn every token by itself.

In trees a draft model needs a forward for each level, because the children of a node are drawn from
the logits at it. Here each forward also reads guesses of the nodes to come. A node that was guessed
has its logits already, and a level whose nodes all were needs no forward. What is drawn follows
from the draft model's logits and the noise of the round alone, never from a guess, so the trees and
their distributions are those of the draft model; only the number of its forwards is another.

Source: Chen et al. 2023, "Cascade Speculative Drafting", arXiv 2312.11462; Spector and Re 2023,
"Accelerating LLM Inference with Staged Speculative Decoding", arXiv 2308.04623. There the draft
model verifies what the smaller model drew, which gives one chain of its distribution; looking drawn
nodes up serves trees under every rule.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.arguments import check_integer
from specdec_hf.drafters.model import DraftModel
from specdec_hf.drafting.call import DrafterCall, Drawn, reads_draft
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import RULES_OF_DRAWN_DRAFTS, Cost, Draft, Round, State
from specdec_hf.request.inputs import check_language_model
from specdec_hf.runner.packed.blocks import DRAFT_WEIGHTS, checked_draft_weights
from specdec_hf.runner.protocol import Lengths, to_device

from specdec_kernels import Rule, Verdict, verify_chain
from specdec_papers.cascade import (
    Cascade,
    Level,
    as_drafter,
    check_rolls_back,
    derived_seeds,
    level_call,
    read_tokens,
    with_drafts,
)
from specdec_papers.sparse_cache import SparseCacheDrafter, SparseCacheStepper

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = -1  # the last committed token, above all nodes
GUESSES = 8  # most chains that a forward reads beside the nodes that were drawn


class StagedModel(DraftModel):
    """The draft model of a `VerticalCascade` for trees, with the interface of `DraftModel`.

    The nodes that its cache holds in a round are numbered in the order they were fed, guesses
    included, so a caller's node has another number in each sequence. A level reads the device once,
    to compare what was drawn with what was guessed.

    Args:
        cascade: its drafter guesses as many tokens at once as `num_assistant_tokens` says.
        call: the call.
        levels: how deep nodes have children; deeper nodes are not guessed.
        number: of the draft model among those of the call.

    Attributes:
        below: the drafter that guesses.

    Raises:
        ValueError: as `DraftModel`.
    """

    def __init__(
        self, cascade: VerticalCascade, call: DrafterCall, levels: int, number: int = 0
    ) -> None:
        weights = cascade.draft_weights
        super().__init__(cascade.model, call, "spec", tree=True, draft_weights=weights)
        self._longest, self._levels = cascade.num_assistant_tokens, levels
        # The most likely guess is drawn most often; under match drafts share the noise of their
        # position, and the same noise draws the guess.
        matched, sampling = call.rule == "match", call.sampling
        inner = level_call(
            call,
            number,
            model=cascade.model,
            runner=None,
            rule="match" if matched else "greedy",
            sampling=sampling if matched else dataclasses.replace(sampling, temperature=0.0),
            seeds=call.seeds.to(self.device),
        )
        self.below = Level(cascade.drafters[0], inner)
        self._begin_round(0)

    def _begin_round(self, batch_size: int) -> None:
        self._level = 0
        # By sequence: the nodes below each node, by token. Nodes of equal token are one.
        self._children: list[dict[int, dict[int, int]]] = [{} for _ in range(batch_size)]
        self._tokens = np.zeros((batch_size, 0), dtype=np.int64)  # of each node
        self._parents = np.zeros((batch_size, 0), dtype=np.int64)
        self._logits: list[torch.Tensor] = []
        self._numbers = np.zeros((batch_size, 0), dtype=np.int64)  # of the caller's nodes

    def catch_up(self, texts: History) -> torch.Tensor:
        self._begin_round(len(texts.lengths))
        self._texts = texts
        self.below.call.begin_round(texts)
        root = np.full(len(texts.lengths), ROOT)
        guess = self._guess(root, self._levels)
        if guess.shape[1] == 0:
            return super().catch_up(texts)
        lengths = texts.lengths
        missing = int((lengths - self.runner.lengths).max())
        window = np.concatenate([texts.last(missing), guess.clip(0)], axis=1)
        tokens = to_device(window, self.device)
        logits = self.runner.forward(tokens, lengths - missing, guess.shape[1] + 1)
        self._add_chain(root, guess)
        self._keep_logits(logits[:, 1:])
        return self._at_own_temperature(logits[:, 0])

    def feed(self, tokens: torch.Tensor, lengths: Lengths, parents: torch.Tensor) -> torch.Tensor:
        size, batch_size = tokens.shape[1], len(lengths)
        self._level += 1
        # An absent node, -1, is fed as token 0, as `DraftModel` does.
        drawn = tokens.clamp(min=0).cpu().numpy()
        above = parents[:, -size:].cpu().numpy()
        numbers = np.zeros((batch_size, size), dtype=np.int64)
        new: list[list[tuple[int, int]]] = []  # by sequence: token and parent
        first = self._tokens.shape[1]
        for b in range(batch_size):
            added: list[tuple[int, int]] = []
            for j in range(size):
                parent = int(self._numbers[b, above[b, j]]) if above[b, j] >= 0 else ROOT
                children = self._children[b].setdefault(parent, {})
                token = int(drawn[b, j])
                if token not in children:
                    children[token] = first + len(added)
                    added.append((token, parent))
                numbers[b, j] = children[token]
            new.append(added)
        self._numbers = np.concatenate([self._numbers, numbers], axis=1)
        if any(new):
            self._forward(new, lengths)
        kept = torch.cat(self._logits, dim=1)
        rows = to_device(numbers, self.device)
        return kept[torch.arange(batch_size, device=self.device)[:, None], rows]

    def keep(self, lengths: Lengths, path: NDArray[np.int64]) -> None:
        known = self._numbers.shape[1]
        if known:
            fed = (path >= 0) & (path < known)
            rows = np.arange(len(path))[:, None]
            path = np.where(fed, self._numbers[rows, np.where(fed, path, 0)], -1)
        self._nodes_fed = self._tokens.shape[1] if known else 0
        super().keep(lengths, path)
        self._begin_round(0)

    def _forward(self, new: list[list[tuple[int, int]]], lengths: Lengths) -> None:
        """Feed nodes of one level, and guesses of those below them."""
        size = max(map(len, new))
        first = self._tokens.shape[1]
        # Sequences with fewer nodes are fed token 0 below the root, which is nobody's child.
        padded = np.array([one + [(0, ROOT)] * (size - len(one)) for one in new], dtype=np.int64)
        self._tokens = np.concatenate([self._tokens, padded[:, :, 0]], axis=1)
        self._parents = np.concatenate([self._parents, padded[:, :, 1]], axis=1)
        for n in range(min(size, GUESSES)):
            wanted = np.array([len(one) > n for one in new])
            under = np.where(wanted, first + n, ROOT)
            self._add_chain(under, self._guess(under, self._levels - self._level, wanted))
        fed = to_device(self._tokens[:, first:], self.device)
        parents = to_device(self._parents, self.device)
        self._keep_logits(self.runner.forward_tree(fed, lengths - 1, parents))

    def _guess(
        self, under: NDArray[np.int64], most: int, wanted: NDArray[np.bool_] | None = None
    ) -> NDArray[np.int64]:
        """[B, up to most] tokens of a chain below a node of each sequence, -1 after its end."""
        texts, none = self._texts, np.zeros((len(under), 0), dtype=np.int64)
        paths = [self._path(b, int(node)) for b, node in enumerate(under)]
        depths = np.array([len(path) for path in paths])
        active = texts.active if wanted is None else texts.active & wanted
        limits = self.room(texts, depths + min(most, self._longest)) - depths
        limits = np.where(active, np.maximum(limits, 0), 0)
        if not limits.any():
            return none
        above = np.full((len(under), int(depths.max())), -1, dtype=np.int64)
        for b, path in enumerate(paths):
            above[b, : len(path)] = path
        proposed = self.below.ask(with_drafts(texts, above, depths, limits > 0), limits)
        # It forgets the path too: the next one may be another.
        self.below.commit(texts, self._nothing_kept(texts.lengths, texts.active))
        if proposed is None:
            return none
        found, counts = read_tokens(proposed)
        return np.where(np.arange(found.shape[1]) < counts[:, None], found, -1)[:, : counts.max()]

    def learn(self, texts: History, done: Round) -> None:
        """Let the drafter below learn of the candidates of a round, whose guesses are forgotten."""
        if done.candidates is not None and self.below.drafter.needs.candidates:
            nothing = self._nothing_kept(done.lengths, done.active)
            self.below.commit(texts, dataclasses.replace(nothing, candidates=done.candidates))

    def end(self, texts: History) -> None:
        self.below.state.end(texts)

    @staticmethod
    def _nothing_kept(lengths: NDArray[np.int64], active: NDArray[np.bool_]) -> Round:
        none = np.zeros((len(lengths), 0), dtype=np.int64)
        return Round.of_chain(lengths, active, np.zeros_like(lengths), none)

    def _path(self, b: int, node: int) -> list[int]:
        """The tokens from the root down to a node."""
        path: list[int] = []
        while node != ROOT:
            path.insert(0, int(self._tokens[b, node]))
            node = int(self._parents[b, node])
        return path

    def _add_chain(self, under: NDArray[np.int64], guess: NDArray[np.int64]) -> None:
        """Number the nodes of a guess [B, n]; the absent ones are nobody's children."""
        first, size = self._tokens.shape[1], guess.shape[1]
        parents = np.tile(np.arange(first - 1, first + size - 1), (len(under), 1))
        parents[:, :1] = under[:, None]
        for b, row in enumerate(guess.tolist()):
            for n, token in enumerate(row):
                if token < 0:
                    break
                self._children[b].setdefault(int(parents[b, n]), {}).setdefault(token, first + n)
        self._tokens = np.concatenate([self._tokens, guess.clip(0)], axis=1)
        self._parents = np.concatenate([self._parents, parents], axis=1)

    def _keep_logits(self, logits: torch.Tensor) -> None:
        self._logits.append(self._at_own_temperature(logits))


class VerticalCascade(Cascade):
    """A draft model whose tokens a smaller drafter drafts.

    A round of the target holds several rounds of the draft model. Each reads the draft model's
    device once for the outcome of the verification, and once more for drafts that lie on a device.
    With a `TreeSpec` it drafts the trees of its model with fewer forwards; see `StagedModel`.

    The draft model may be the target over a `SparseCacheDrafter`, as in TriForce (Sun et al. 2024,
    arXiv 2404.11912): it then drafts chains for that target.

    Args:
        model: the draft model. Neither it nor its configs are changed. Or a `SparseCacheDrafter`,
            or its name.
        drafter: drafts for it: a smaller model, the name of a drafter, or a `Drafter`, such as
            another `VerticalCascade`; one that rolls back.
        num_assistant_tokens: tokens that ``drafter`` drafts in each round of ``model``.
        draft_weights: of ``model``, see `DraftModel`.

    Raises:
        TypeError: no model, or no drafter.
        ValueError: a drafter that does not roll back.
    """

    name = "vertical_cascade"
    draws = True
    rules = RULES_OF_DRAWN_DRAFTS

    def __init__(
        self,
        model: Any,
        drafter: Any,
        num_assistant_tokens: int = 3,
        *,
        draft_weights: str = DRAFT_WEIGHTS[0],
    ) -> None:
        self.draft_weights = checked_draft_weights(draft_weights)
        self.model: Any = as_drafter(model) if isinstance(model, str) else model
        if isinstance(self.model, SparseCacheDrafter):
            self.rolls_back = False
        else:
            check_language_model("model", self.model)
        self.num_assistant_tokens = check_integer("num_assistant_tokens", num_assistant_tokens, 1)
        super().__init__([drafter])
        check_rolls_back(self.drafters[0])
        forwards = isinstance(self.model, SparseCacheDrafter)
        self.is_model = not forwards
        self.needs = dataclasses.replace(self.needs, target_forward=forwards)

    def for_target(self, model: Any) -> Self:
        """The same of a drafter that drafts for the draft model."""
        sparse = isinstance(self.model, SparseCacheDrafter)
        return super().for_target(model if sparse else self.model)

    def begin(self, call: DrafterCall) -> State:
        """Check the vocabularies and make empty caches.

        Raises:
            ValueError: vocabularies that differ in size, and what `SparseCacheDrafter` refuses.
        """
        return VerticalState(self, call)

    def tree_model(self, call: DrafterCall, depth: int, number: int) -> DraftModel:
        return StagedModel(self, call, depth - 1, number)


class VerticalState(State):
    """What the draft model of a `VerticalCascade` and the drafter below it know of a call."""

    def __init__(self, drafter: VerticalCascade, call: DrafterCall) -> None:
        self.drafter, self.call = drafter, call
        self.stepper: DraftModel | SparseCacheStepper
        if isinstance(drafter.model, SparseCacheDrafter):
            self.stepper, lead = drafter.model.stepper(call), call.model
        else:
            weights, lead = drafter.draft_weights, drafter.model
            self.stepper = DraftModel(lead, call, draft_weights=weights)
        self.cost = Cost(self.stepper.cost.relative)
        # The draft model's rule. Where Q is read it must be lossless for Q. Under match all levels
        # share the noise of a position, and the greedy rule serves drafts that are not drawn.
        rule = "greedy"
        if call.rule == "match" or reads_draft(call.rule):
            rule = "match" if call.rule == "match" else "token"
        inner = level_call(
            call,
            0,
            model=lead,
            runner=None,
            rule=rule,
            seeds=call.seeds.to(self.stepper.device),
        )
        self._seeds = call.seeds.cpu()
        self.below = Level(drafter.drafters[0], inner)

    def propose(self, texts: History, limits: NDArray[np.int64]) -> Draft | None:
        call, stepper, batch_size = self.call, self.stepper, len(texts.lengths)
        limits = stepper.room(texts, limits)
        gamma = int(limits.max())
        if gamma < 1:
            return None
        active = limits > 0
        stepper.begin_round(dataclasses.replace(texts, active=active))
        drafted = np.full((batch_size, gamma), -1, dtype=np.int64)
        counts = np.zeros(batch_size, dtype=np.int64)
        rows: torch.Tensor | None = None
        self.below.call.begin_round(texts)
        seeds = self._round_seeds(texts.lengths)
        before = with_drafts(texts, drafted, counts, active)
        while active.any():
            # A sequence's own number: the noise of its drafts must not depend on the batch.
            longest = self.drafter.num_assistant_tokens
            most = np.where(active, np.minimum(limits - counts - 1, longest), 0)
            emitted, accepted, logits = self._round(before, most, seeds)
            if rows is None:
                rows = logits.new_zeros((batch_size, gamma, logits.shape[2]))
            added = np.where(active, np.minimum((emitted >= 0).sum(axis=1), limits - counts), 0)
            for b in np.flatnonzero(added).tolist():
                to = slice(int(counts[b]), int(counts[b] + added[b]))
                drafted[b, to] = emitted[b, : added[b]]
                rows[b, to] = logits[b, : added[b]]
            counts += added
            active = active & (added > 0) & (counts < limits)
            # The last of the added tokens is pending: no cache holds it.
            kept = np.minimum(accepted, np.maximum(added - 1, 0))
            stepper.truncate(before.lengths + np.maximum(added - 1, 0))
            after = with_drafts(texts, drafted, counts, active)
            done = Round.of_chain(before.lengths, before.active, kept, emitted)
            self.below.commit(after, done)
            before = after
        if rows is None or not counts.any():
            return None
        tokens = torch.from_numpy(drafted)
        if not reads_draft(call.rule) and call.asks.continue_drafting is None:
            return Draft(tokens, counts=counts)
        # The statistics of the rows; the tokens that come with them are not used.
        drawn = call.draw(texts, rows, range(gamma), sampling=stepper.sampling)
        drawn = dataclasses.replace(drawn, tokens=tokens.to(stepper.device))
        return Draft(tokens.to(call.model.device), drawn=drawn, counts=counts)

    def commit(self, texts: History, done: Round) -> None:
        self.stepper.truncate(done.lengths + done.accepted)
        self.below.commit(texts, done)

    def end(self, texts: History) -> None:
        self.below.state.end(texts)

    def _round(
        self, texts: History, most: NDArray[np.int64], seeds: torch.Tensor
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], torch.Tensor]:
        """One round of the draft model.

        Args:
            texts: what it continues.
            most: [B], how many tokens the smaller drafter may draft.
            seeds: [B] int64, of the verification.

        Returns:
            Emitted tokens [B, m+1], -1 after their end; [B] how many of them were drafted; and the
            draft model's logits [B, m+1, V].
        """
        stepper, runner, proposed = self.stepper, self.stepper.runner, None
        if most.any():
            proposed = self.below.ask(dataclasses.replace(texts, active=most > 0), most)
        ids = torch.empty((len(texts.lengths), 0), dtype=torch.int64, device=stepper.device)
        drawn = None
        if proposed is not None:
            found, counts = read_tokens(proposed)
            found = np.where(np.arange(found.shape[1]) < counts[:, None], found, -1)
            ids, drawn = to_device(found, stepper.device), proposed.drawn
        missing = int((texts.lengths - runner.lengths).max())
        window = to_device(texts.last(missing), stepper.device)
        window = torch.cat([window, ids.clamp(min=0)], dim=1)
        logits = runner.forward(window, texts.lengths - missing, ids.shape[1] + 1)
        positions = to_device(texts.lengths, stepper.device)
        verdict = self._verify(logits, ids, drawn, seeds, positions)
        outcome = torch.cat([verdict.tokens, verdict.num_accepted[:, None].long()], dim=1)
        read = outcome.cpu().numpy()
        return read[:, :-1], read[:, -1], logits

    def _verify(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        drawn: Drawn | None,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> Verdict:
        given = self.below.call.sampling_on(self.stepper.device)
        draft = None if drawn is None else drawn.at(given["temperature"])
        given |= {**self.stepper.sampling, "seeds": seeds}
        rule = cast(Rule, self.below.call.rule)
        return verify_chain(logits, ids, draft, rule=rule, **given, positions=positions)

    def _round_seeds(self, lengths: NDArray[np.int64]) -> torch.Tensor:
        """[B] int64, the seeds with which the draft model verifies in this round of the target.

        The target verifies at the same positions, and needs noise that decided nothing before.
        """
        inner = self.below.call
        if inner.rule == "match":
            return inner.seeds
        seeds = derived_seeds(
            self._seeds, inner.round.lengths, lengths, self.call.first_draft_index
        )
        return seeds.to(self.stepper.device, non_blocking=True)
