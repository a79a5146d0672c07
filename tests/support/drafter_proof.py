"""Proofs that a drafter loses nothing: greedy text, and the joint distribution of sampled texts.

The target of the sampled texts has four tokens, so that the probabilities of all texts of a few
tokens can be computed and compared with the texts that were generated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from proofs import chi_square
from specdec_hf import Draft, DraftContext, History, generate
from specdec_hf.drafting import checks
from specdec_hf.drafting.context import reads_draft
from specdec_hf.drafting.drafter import rules_of
from specdec_hf.loop import drafted
from specdec_hf.schedules.base import Schedule
from support import hf_models

from specdec_kernels import SampledDraft

VOCAB, LENGTH, GAMMA = 4, 4, 3
PROMPTS = ([1, 2, 1], [3, 0], [2, 2, 1, 0, 2])
BATCHES = ((9,), (9, 1, 12))  # lengths of prompts; one of one token is drafted for no earlier


def assert_greedy_identical(make: Any, model: Any, new_tokens: int = 24, **kwargs: Any) -> Any:
    """Greedy text is that of plain generation, of one sequence and of a ragged batch of three."""
    for lengths in BATCHES:
        inputs, expected = _plain_greedy(model, lengths, new_tokens)
        out = generate(
            model, **inputs, max_new_tokens=new_tokens, do_sample=False, drafter=make(),
            guard=False, return_dict_in_generate=True, **kwargs,
        )  # fmt: skip
        assert out.sequences.tolist() == expected
        assert out.stats.drafted > 0
    return out.stats


@functools.cache
def _plain_greedy(model: Any, lengths: tuple[int, ...], new_tokens: int) -> tuple[Any, Any]:
    """Prompts of these lengths, and the model's own text after them."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    inputs = hf_models.prompts(lengths, vocab_size=vocab_size)
    text = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return inputs, text.tolist()


class RaggedSchedule(Schedule):
    """Limits of some sequences of a batch, other ones of each in every round, and 0 among them."""

    name = "ragged"
    trees = True
    LIMITS = np.array([[1, 0, 5, 2, 3, 1], [5, 3, 1, 0, 1, 2], [2, 5, 3, 1, 0, 4]])

    def __init__(self, *sequences: int) -> None:
        self.sequences = list(sequences)
        self.rounds = 0

    def lengths(self, most: Any) -> Any:
        self.rounds += 1
        of_round = self.LIMITS[self.sequences, self.rounds % self.LIMITS.shape[1]]
        return np.minimum(of_round, most)


@contextmanager
def recorded_drafts() -> Iterator[list[tuple[Any, list[Any]]]]:
    """The limits [B] of each round, and the paths to the nodes that each sequence drafts in it."""
    rounds: list[tuple[Any, list[Any]]] = []

    def ask(drafter: Any, history: History, limits: Any, context: DraftContext) -> Draft | None:
        draft = checks.ask(drafter, history, limits, context)
        rounds.append((limits, [_paths(draft, b, limit) for b, limit in enumerate(limits)]))
        return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafted, "ask", ask)
        yield rounds


def _paths(draft: Draft | None, b: int, limit: int) -> list[tuple[int, ...]]:
    """The paths down to the nodes that sequence ``b`` drafts within its limit."""
    if draft is None:
        return []
    tokens = draft.tokens[b].tolist()
    if draft.parents is None:
        assert draft.counts is not None
        del tokens[min(draft.counts[b], limit) :]
    above = range(-1, len(tokens)) if draft.parents is None else draft.parents[b].tolist()
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for n, (token, parent) in enumerate(zip(tokens, above, strict=False)):
        if token >= 0 and parent in paths and len(paths[parent]) < limit:
            paths[n] = (*paths[parent], token)
    return [path for path in paths.values() if path]


def assert_independent_of_batch(
    make: Any,
    model: Any,
    new_tokens: int = 16,
    *,
    seed: int = 5,
    drafts: bool = True,
    ragged: bool = False,
    **kwargs: Any,
) -> Any:
    """A sampled sequence of a ragged batch of three is that of a call of its own.

    Args:
        make: makes the drafter of a call. One that always returns the same object shows that what
            it learns in a call does not change the next one.
        drafts: whether as many tokens are drafted for it and accepted, too.
        ragged: whether the limits are those of a `RaggedSchedule`. The same tokens must then be
            drafted, as long as the text is the same.
    """
    lengths = BATCHES[-1]
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    inputs = hf_models.prompts(lengths, vocab_size=vocab_size)
    settings = {
        "max_new_tokens": new_tokens, "do_sample": True, "guard": False,
        "return_dict_in_generate": True, **kwargs,
    }  # fmt: skip
    seeds = [seed + b for b in range(len(lengths))]

    def call(sequences: list[int], given: Any) -> tuple[Any, Any]:
        """The output, and what each sequence drafted in each round that it was to draft in."""
        schedule = {"num_assistant_tokens_schedule": RaggedSchedule(*sequences)} if ragged else {}
        with recorded_drafts() as rounds:
            out = generate(
                model, **given, **settings, **schedule, drafter=make(),
                seed=[seeds[b] for b in sequences],
            )  # fmt: skip
        asked = range(len(sequences))
        return out, [[drawn[b] for limits, drawn in rounds if limits[b]] for b in asked]

    together, drafted_together = call([*range(len(lengths))], inputs)
    assert together.stats.drafted > 0
    for b, length in enumerate(lengths):
        alone = {key: value[b : b + 1, -length:] for key, value in inputs.items()}
        got, (drafted_alone,) = call([b], alone)
        if ragged:
            assert drafted_alone == drafted_together[b]
        assert got.sequences[0, length:].tolist() == together.sequences[b, -new_tokens:].tolist()
        if drafts:
            ours, of_batch = got.stats.sequences[0], together.stats.sequences[b]
            assert ours.drafted == of_batch.drafted
            assert ours.acceptance_histogram == of_batch.acceptance_histogram
    return together.stats


@functools.cache
def target(
    prompt: int = 0, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[Any, torch.Tensor]:
    """A model, and the probabilities of the first `LENGTH` tokens of its texts after a prompt."""
    model = _of_four_tokens()
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
    begin = torch.tensor(PROMPTS[prompt]).expand(len(texts), -1)
    with torch.no_grad():
        logits = model(torch.cat([begin, texts], dim=1)).logits[:, begin.shape[1] - 1 : -1]
    if top_k:
        smallest = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    rows = (logits.double() / temperature).log_softmax(dim=-1)
    if top_p < 1:
        descending, order = rows.exp().sort(dim=-1, descending=True)
        outside = descending.cumsum(dim=-1) - descending >= top_p
        rows = rows.masked_fill(outside.gather(-1, order.argsort(dim=-1)), -torch.inf)
        rows = rows.log_softmax(dim=-1)
    return model, rows.gather(2, texts[..., None])[..., 0].sum(dim=1).exp()


_of_four_tokens = functools.cache(lambda: hf_models.build("llama", vocab_size=VOCAB))


def joint_p_value(
    drafter: Any,
    rule: str = "token",
    *,
    texts: int,
    prompt: int = 2,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos: int | None = None,
    **kwargs: Any,
) -> float:
    """The probability that texts of the target's distribution lie as far from it as those drafted.

    The texts are `GAMMA` tokens longer than those compared, so that their end cuts no drafts.
    """
    model, probs = target(prompt, temperature, top_k, top_p)
    if eos is not None:
        probs = _of_texts_that_end(probs, eos)
        kwargs |= {"eos_token_id": eos, "pad_token_id": 0}
    ids = torch.tensor(PROMPTS[prompt]).expand(texts, -1)
    out = generate(
        model, ids, attention_mask=torch.ones_like(ids), drafter=drafter, rule=rule, do_sample=True,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=list(range(texts)), guard=False,
        max_new_tokens=LENGTH + GAMMA, return_dict_in_generate=True, **{"gamma": GAMMA, **kwargs},
    )  # fmt: skip
    assert out.stats.drafted > texts / 2
    assert out.stats.accepted > texts / 8
    first = out.sequences[:, ids.shape[1] :][:, :LENGTH]
    codes = (first * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(dim=1)
    return chi_square(codes, probs)


def _of_texts_that_end(probs: torch.Tensor, eos: int) -> torch.Tensor:
    """The probabilities where a text is that up to its end, with zeros behind."""
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
    ended = (texts == eos).cumsum(dim=1) - (texts == eos).long() > 0
    codes = (texts.masked_fill(ended, 0) * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(dim=1)
    return torch.zeros_like(probs).index_add_(0, codes, probs)


def with_twin(drafter: Any, twin: Any) -> Any:
    """The drafter, but it fails where its twin, which has other seeds, drafts anything else.

    What both are told of a call is the same. So a draft is a function of that, and has nothing to
    do with the noise that it is verified with.
    """

    class HasTwin(type(drafter)):  # type: ignore[misc]
        rounds = 0

        def start(self, context: DraftContext) -> None:
            super().start(context)
            twin.start(dataclasses.replace(context, seeds=context.seeds + 1000))

        def propose(self, history: History, limits: Any) -> Draft | None:
            drafts = [super().propose(history, limits), twin.propose(history, limits)]
            ours, others = (None if draft is None else draft.tokens.tolist() for draft in drafts)
            assert ours == others
            self.rounds += ours is not None
            return drafts[0]

        def observe(self, *told: Any) -> None:
            super().observe(*told)
            twin.observe(*told)

        def commit(self, *told: Any) -> None:
            super().commit(*told)
            twin.commit(*told)

    drafter.__class__ = HasTwin
    return drafter


def with_wrong_distribution(drafter: Any) -> Any:
    """The drafter, but it says that each draft was drawn from one and the same distribution.

    Rules that read the draft distribution then give other texts than the target's: the negative
    control of every drafter. A drafter of several chains drafts one, and a drafter of trees whose
    rule "auto" does not read the distribution is verified with multi_draft.
    """

    class WrongDistribution(type(drafter)):  # type: ignore[misc]
        noise = "independent"
        draws, several = True, False

        def propose(self, history: History, limits: Any) -> Draft | None:
            draft: Draft | None = super().propose(history, limits)
            if draft is not None and draft.parents is not None:
                draft.distribution = _rising((len(draft.tokens), 1))
                draft.draft_rows = torch.zeros_like(draft.tokens, dtype=torch.int32)
            elif draft is not None:
                draft.distribution = _rising(tuple(draft.tokens.shape))
            return draft

    drafter.__class__ = WrongDistribution
    if drafter.size and not reads_draft(rules_of(drafter)[0]):
        drafter.rules = ("multi_draft",)
    return drafter


def _rising(shape: tuple[int, ...]) -> SampledDraft:
    """Rows in which every token is twice as likely as the one before it."""
    rows = (torch.arange(VOCAB) * math.log(2)).repeat(*shape, 1)
    sums = rows.logsumexp(dim=-1)
    return SampledDraft(rows, sums, torch.full_like(sums, -torch.inf), 1.0)
