"""Trees of a draft model whose nodes a smaller drafter guesses before they are drawn.

A draft model needs a forward for each level of a tree, because the children of a node are drawn
from the logits at it. Here each forward also reads guesses of the nodes to come. A node that was
guessed has its logits already, and a level whose nodes all were needs no forward.

What is drawn follows from the draft model's logits and the noise of the round alone, never from a
guess. So the trees, and the distributions that come with them, are those of the draft model; only
the number of its forwards is another.

Source: Spector and Re 2023, "Accelerating LLM Inference with Staged Speculative Decoding", arXiv
2308.04623. There the draft model verifies what the smaller model drew, which gives one chain of its
distribution; looking drawn nodes up serves trees under every rule.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.cascade import (
    Level,
    VerticalCascade,
    level_call,
    read_tokens,
    with_drafts,
)
from specdec_hf.drafters.model import DraftModel
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Round
from specdec_hf.runner.protocol import Lengths, to_device
from specdec_hf.runner.spec_runner import SpecRunner

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
        super().__init__(cascade.model, call, "spec", tree=True)
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
        assert isinstance(self.runner, SpecRunner)
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
        found, counts = read_tokens(proposed, limits)
        return np.where(np.arange(found.shape[1]) < counts[:, None], found, -1)[:, : counts.max()]

    def learn(self, texts: History, done: Round) -> None:
        """Let the drafter below learn of the candidates of a round, whose guesses are forgotten.

        Args:
            texts: the committed tokens after it.
            done: the round.
        """
        if done.candidates is not None and self.below.drafter.needs.candidates:
            nothing = self._nothing_kept(done.lengths, done.active)
            self.below.commit(texts, dataclasses.replace(nothing, candidates=done.candidates))

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
