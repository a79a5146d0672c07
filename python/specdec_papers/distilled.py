"""A draft model that learns from the target while it serves.

Where a draft was rejected, the verification has computed the target's distribution P. The draft
model is trained towards it between calls. Each draft comes with the distribution that it was drawn
from, so a model that has learnt changes what is drafted, and no text's distribution.

Source: Liu et al. 2023, "Online Speculative Decoding", arXiv 2310.07177: distillation at the tokens
that were wrong, with the forward divergence KL(P || Q).
"""

from __future__ import annotations

import copy
import math
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.arguments import check_integer, check_number
from specdec_hf.drafters.chain import ChainState
from specdec_hf.drafters.kept_texts import note_earlier_calls
from specdec_hf.drafters.model import ModelDrafter
from specdec_hf.drafting.call import DrafterCall, reads_draft
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Needs, Rejections, Round, State
from specdec_hf.request.inputs import check_language_model
from specdec_hf.runner.protocol import forward_arguments, to_device
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

CLIP = 1.0  # norm of a gradient
TOKENS_AT_ONCE = 2048  # of one forward in training, padding included


@dataclass
class RejectedPositions:
    """The positions of one sequence at which drafts were rejected.

    Attributes:
        lengths: number of tokens before each of them.
        logits: [V] of the target at each of them.
    """

    lengths: list[int]
    logits: list[torch.Tensor]


class DistilledDrafter(ModelDrafter):
    """A draft model that takes gradient steps between calls, where its drafts were rejected.

    A call collects the target's distribution at its rejected drafts. When all its sequences have
    ended, the model takes ``steps`` steps of AdamW on the mean of KL(P || Q) over these positions.
    Nothing is learnt within a call: its text follows from its seed, and from what earlier calls
    have taught. Greedy text and text of rule match are the same whatever was learnt. Under a rule
    that reads Q a call must have seeds of its own, as ``seed=None`` gives them: its Q would
    otherwise depend on the noise that decides the text, which would bias it. So must calls that run
    at once, because each of them drafts with what the others teach as soon as they have ended.

    It learns where it drafts chains by itself, not in a tree or a cascade.

    Args:
        model: the draft model to begin with. It is copied in float32, and neither it nor its
            configs are changed.
        learning_rate: of AdamW, above 0.
        steps: after each call with rejected drafts.
        max_positions: rejected drafts of a call that are learnt, the first ones; each takes as much
            memory as a row of the target's logits until the call has ended.
        cache, temperature, top_k, top_p, min_p: as in `ModelDrafter`.

    Attributes:
        model: the copy, which drafts. Its optimiser has twice its memory.
        student: the copy as what learns.

    Raises:
        TypeError: no model, or an argument of a wrong type.
        ValueError: an argument out of range; in `begin`, a seed that it has learnt from, under a
            rule that reads Q.

    Source: Liu et al. 2023, "Online Speculative Decoding", arXiv 2310.07177.

    >>> drafter = DistilledDrafter(small)  # doctest: +SKIP
    >>> for inputs in questions:  # doctest: +SKIP
    ...     generate(model, **inputs, drafter=drafter)
    >>> drafter.save("small-for-these-questions")  # doctest: +SKIP
    """

    name = "distilled"
    needs = Needs(rejections=True)
    is_model = False  # it learns from chains
    draft_weights = "float"  # a step of training may be smaller than one of int8

    def __init__(
        self,
        model: Any,
        learning_rate: float = 1e-4,
        steps: int = 1,
        max_positions: int = 512,
        cache: str = "auto",
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
    ) -> None:
        check_language_model("model", model)
        self.learning_rate = check_number("learning_rate", learning_rate, 0)
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be above 0 and finite, got {learning_rate}")
        self.steps = check_integer("steps", steps, 1)
        self.max_positions = check_integer("max_positions", max_positions, 1)
        self._dtype = model.dtype
        with torch.inference_mode(False):
            own = copy.deepcopy(model).float().eval().requires_grad_(True)
        super().__init__(own, cache, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        self.student = Student(own, self.learning_rate, self.steps)

    @property
    def num_learnt(self) -> int:
        """Rejected drafts that the model has learnt from so far."""
        return self.student.num_learnt

    def begin(self, call: DrafterCall) -> State:
        """Make an empty cache.

        Raises:
            ValueError: a seed that the model has learnt from, or that an open call has, under a
                rule that reads Q.
        """
        return DistilledState(self, call)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model as it is now, as ``save_pretrained`` does; its tokenizer is not written.

        The weights have the dtype of the model that was given.
        ``AutoModelForCausalLM.from_pretrained(folder)`` reads it, to draft or to learn on.
        """
        copy.deepcopy(self.model).to("cpu", self._dtype).save_pretrained(folder)


_LEARNING = threading.Lock()  # no copy of a student holds one


class Student:
    """A model that outlives the calls whose rejected drafts it learns from.

    Args:
        model: the model, which is trained in its place.
        learning_rate: of AdamW.
        steps: after each call with rejected drafts.

    Attributes:
        num_learnt: rejected drafts that it has learnt from so far.
        seeds: of the sampled sequences that these were drafted for.
        open: the states of calls that have not ended, whose drafts may be learnt.
    """

    def __init__(self, model: Any, learning_rate: float, steps: int) -> None:
        self.model, self.steps = model, steps
        self.num_learnt = 0
        self.seeds: set[int] = set()
        self.open: weakref.WeakSet[DistilledState] = weakref.WeakSet()
        self._optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.0)

    def learn(
        self, texts: History, rejected: dict[int, RejectedPositions], seeds: Iterable[int]
    ) -> int:
        """Take the steps of one call.

        Args:
            texts: its committed tokens.
            rejected: at least one position, by the number of the sequence.
            seeds: of these sequences, where they are sampled.

        Returns:
            How many steps were taken: fewer where the gradient of the next one is not finite.
        """
        count, made = sum(len(one.lengths) for one in rejected.values()), 0
        with _LEARNING, torch.inference_mode(False), torch.enable_grad():
            while made < self.steps:
                self._optimizer.zero_grad(set_to_none=True)
                for batch in _batches(rejected):
                    loss = _divergence(self.model, texts.tokens, batch) / count
                    loss.backward()
                norm = clip_grad_norm_(self.model.parameters(), CLIP)
                if not torch.isfinite(norm):
                    break
                if not made:
                    self.seeds.update(seeds)  # before a call can draft with what they taught
                self._optimizer.step()
                made += 1
            self._optimizer.zero_grad(set_to_none=True)
            self.num_learnt += count if made else 0
        return made


class DistilledState(ChainState):
    """Drafts chains, and collects the target's distributions where drafts are rejected."""

    def __init__(self, drafter: DistilledDrafter, call: DrafterCall) -> None:
        self._seeds = call.sampled_seeds()  # of the sequences that are sampled
        student = drafter.student
        known = student.seeds.union(*(one._seeds.values() for one in student.open))
        repeated = [seed for seed in self._seeds.values() if seed in known]
        if repeated and reads_draft(call.rule):
            raise ValueError(
                f"seed must be none that drafter {drafter.name} learns from, because rule "
                f"{call.rule} reads its distribution, got {repeated[0]} again; seed=None draws "
                "others"
            )
        super().__init__(call, drafter.drafting_model(call))
        student.open.add(self)
        self.drafter = drafter
        self._rejected: dict[int, RejectedPositions] = {}
        if drafter.num_learnt:
            note_earlier_calls(drafter, call)

    def learn(self, rejections: Rejections) -> None:
        """Collect the rejected drafts of a round, as far as the drafter learns more of them."""
        collected = sum(len(one.lengths) for one in self._rejected.values())
        free = self.drafter.max_positions - collected
        for b, length, logits in zip(
            rejections.sequences[:free].tolist(), rejections.lengths[:free].tolist(),
            rejections.logits[:free], strict=True,
        ):  # fmt: skip
            rejected = self._rejected.setdefault(b, RejectedPositions([], []))
            rejected.lengths.append(length)
            rejected.logits.append(logits)

    def commit(self, texts: History, done: Round) -> None:
        if done.rejections is not None:
            self.learn(done.rejections)
        super().commit(texts, done)

    def end(self, texts: History) -> None:
        rejected, self._rejected = self._rejected, {}
        self.drafter.student.open.discard(self)
        if not rejected:
            return
        seeds = [seed for b, seed in self._seeds.items() if b in rejected]
        steps, made = self.drafter.steps, self.drafter.student.learn(texts, rejected, seeds)
        if made < steps:
            self.call.note(
                f"drafter {self.drafter.name} took {made} of {steps} steps after the call: the "
                "gradient of the next one is not finite"
            )


def _batches(
    rejected: dict[int, RejectedPositions],
) -> Iterator[list[tuple[int, int, RejectedPositions]]]:
    """The sequences with rejected drafts, the longest first, in batches for one forward each.

    Of each: its number, its number of tokens up to its last rejected draft, and the positions.
    """
    order = sorted(rejected, key=lambda b: -max(rejected[b].lengths))
    first = 0
    while first < len(order):
        longest = max(rejected[order[first]].lengths)
        size = max(1, TOKENS_AT_ONCE // longest)
        chosen = order[first : first + size]
        yield [(b, max(rejected[b].lengths), rejected[b]) for b in chosen]
        first += size


def _divergence(
    model: Any, tokens: NDArray[np.int64], batch: list[tuple[int, int, RejectedPositions]]
) -> torch.Tensor:
    """The sum of KL(P || Q) over the rejected positions of some sequences, up to a constant.

    P and Q are the distributions at temperature 1. Padding follows the tokens, so causal attention
    never sees it.
    """
    device, longest = model.device, max(size for _, size, _ in batch)
    ids = np.zeros((len(batch), longest), dtype=np.int64)
    for row, (b, size, _) in enumerate(batch):
        ids[row, :size] = tokens[b, :size]
    places = [(row, n - 1) for row, (_, _, one) in enumerate(batch) for n in one.lengths]
    rows, columns = torch.tensor(places, device=device).T
    inputs: dict[str, Any] = {"input_ids": to_device(ids, device), "use_cache": False}
    if "logits_to_keep" in forward_arguments(model):
        inputs["logits_to_keep"], columns = columns.unique(return_inverse=True)
    logits = model(**inputs).logits[rows, columns].float()
    wanted = torch.stack([x for _, _, one in batch for x in one.logits]).to(device)
    return cross_entropy(logits, wanted.float().softmax(dim=-1), reduction="sum")
