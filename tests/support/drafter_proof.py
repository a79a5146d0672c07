"""Proofs that a drafter loses nothing: greedy text, and the joint distribution of sampled texts.

The target of the sampled texts has four tokens, so that the probabilities of all texts of a few
tokens can be computed and compared with the texts that were generated.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from specdec_hf import Draft, History, TreeDraft, TreeDrafter, generate
from specdec_hf.drafters.context import reads_draft
from support import hf_models
from support.providers import chi_square

from specdec_kernels import SampledDraft

VOCAB, LENGTH, GAMMA = 4, 4, 3
PROMPTS = ([1, 2, 1], [3, 0], [2, 2, 1, 0, 2])
BATCHES = ((9,), (9, 1, 12))  # lengths of prompts; one of one token is drafted for no earlier


def assert_greedy_identical(make: Any, model: Any, new_tokens: int = 24, **kwargs: Any) -> Any:
    """Greedy text equals plain generation, for one sequence and for a ragged batch of three.

    Args:
        make: makes the drafter of a call.
        model: the target.
        new_tokens: length of each text.
        kwargs: of `generate`.

    Returns:
        The statistics of the batch.
    """
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    for lengths in BATCHES:
        inputs = hf_models.prompts(lengths, vocab_size=vocab_size)
        settings = {"max_new_tokens": new_tokens, "do_sample": False}
        expected = model.generate(**inputs, **settings)
        out = generate(
            model, **inputs, **settings, drafter=make(), guard=False, return_dict_in_generate=True,
            **kwargs,
        )  # fmt: skip
        assert out.sequences.tolist() == expected.tolist()
        assert out.stats.drafted > 0
    return out.stats


def assert_independent_of_batch(
    make: Any,
    model: Any,
    new_tokens: int = 16,
    *,
    seed: int = 5,
    drafts: bool = True,
    **kwargs: Any,
) -> Any:
    """A sampled sequence of a ragged batch of three is that of a call of its own.

    Args:
        make: makes the drafter of a call. One that always returns the same object shows that what
            it learns in a call does not change the next one.
        model: the target.
        new_tokens: length of each text.
        seed: of the first sequence; each other one has the next.
        drafts: whether as many tokens are drafted for it and accepted, too.
        kwargs: of `generate`.

    Returns:
        The statistics of the batch.
    """
    lengths = BATCHES[-1]
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    inputs = hf_models.prompts(lengths, vocab_size=vocab_size)
    settings = {
        "max_new_tokens": new_tokens, "do_sample": True, "guard": False,
        "return_dict_in_generate": True, **kwargs,
    }  # fmt: skip
    seeds = [seed + b for b in range(len(lengths))]
    together = generate(model, **inputs, **settings, drafter=make(), seed=seeds)
    assert together.stats.drafted > 0
    for b, length in enumerate(lengths):
        alone = {key: value[b : b + 1, -length:] for key, value in inputs.items()}
        got = generate(model, **alone, **settings, drafter=make(), seed=seeds[b])
        assert got.sequences[0, length:].tolist() == together.sequences[b, -new_tokens:].tolist()
        if drafts:
            ours, of_batch = got.stats.sequences[0], together.stats.sequences[b]
            assert ours.drafted == of_batch.drafted
            assert ours.acceptance_histogram == of_batch.acceptance_histogram
    return together.stats


@functools.cache
def target(name: str = "llama", prompt: int = 0) -> tuple[Any, torch.Tensor]:
    """A model, and the probabilities of the first `LENGTH` tokens of its texts after a prompt."""
    model = hf_models.build(name, vocab_size=VOCAB)
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
    begin = torch.tensor(PROMPTS[prompt]).expand(len(texts), -1)
    with torch.no_grad():
        logits = model(torch.cat([begin, texts], dim=1)).logits[:, begin.shape[1] - 1 : -1]
    logprobs = logits.double().log_softmax(dim=-1).gather(2, texts[..., None])[..., 0]
    return model, logprobs.sum(dim=1).exp()


def joint_p_value(
    drafter: Any,
    rule: str = "token",
    *,
    name: str = "llama",
    texts: int = 6000,
    ragged: bool = False,
    alone: bool = False,
    prompt: int = 0,
    **kwargs: Any,
) -> float:
    """The probability that texts of the target's distribution lie as far from it as those drafted.

    Args:
        drafter: drafts up to `GAMMA` tokens of texts that are `GAMMA` tokens longer than those
            compared, so that the end of a text cuts none of their drafts.
        rule: acceptance rule.
        name: of the target's class.
        texts: how many are generated, as one batch.
        alone: whether each text is that of a call of its own, in place of one batch.
        ragged: whether the batch has three prompts of different lengths, each a third of the texts.
        prompt: which of `PROMPTS` all texts begin with, where the batch is not ragged.
        kwargs: of `generate`.
    """
    numbers = list(range(len(PROMPTS))) if ragged else [prompt]
    prompts = [PROMPTS[number] for number in numbers]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
    each = texts // len(prompts)
    model, _ = target(name)
    ids, mask, seeds = ids.repeat(each, 1), mask.repeat(each, 1), range(each * len(prompts))
    size = 1 if alone else len(seeds)
    calls = [
        generate(
            model, ids[b : b + size], attention_mask=mask[b : b + size], drafter=drafter, rule=rule,
            do_sample=True, top_k=0, seed=list(seeds[b : b + size]), guard=False,
            max_new_tokens=LENGTH + GAMMA, return_dict_in_generate=True,
            **{"gamma": GAMMA, **kwargs},
        )
        for b in range(0, len(seeds), size)
    ]  # fmt: skip
    assert sum(out.stats.drafted for out in calls) > texts / 2
    assert sum(out.stats.accepted for out in calls) > texts / 8
    first = torch.cat([out.sequences for out in calls])[:, width:][:, :LENGTH]
    codes = (first * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(dim=1)
    p_values = [
        chi_square(codes[b :: len(prompts)], target(name, number)[1])
        for b, number in enumerate(numbers)
    ]
    return min(1.0, min(p_values) * len(prompts))


def with_wrong_distribution(drafter: Any) -> Any:
    """The drafter, but it says that each draft was drawn from one and the same distribution.

    Rules that read the draft distribution then give other texts than the target's: the negative
    control of every drafter. A drafter of several chains drafts one, and a drafter of trees whose
    rule "auto" does not read the distribution is verified with multi_draft.
    """

    class WrongDistribution(type(drafter)):  # type: ignore[misc]
        noise = "independent"
        draws, several = True, False

        def propose(self, history: History, limits: Any) -> Draft | TreeDraft | None:
            draft: Draft | TreeDraft | None = super().propose(history, limits)
            if isinstance(draft, TreeDraft):
                draft.distribution = _rising((len(draft.tokens), 1))
                draft.draft_rows = torch.zeros_like(draft.tokens, dtype=torch.int32)
            elif draft is not None:
                draft.distribution = _rising(tuple(draft.tokens.shape))
            return draft

    drafter.__class__ = WrongDistribution
    if isinstance(drafter, TreeDrafter) and not reads_draft(drafter.rules[0]):
        drafter.rules = ("multi_draft",)
    return drafter


def _rising(shape: tuple[int, ...]) -> SampledDraft:
    """Rows in which every token is twice as likely as the one before it."""
    rows = (torch.arange(VOCAB) * math.log(2)).repeat(*shape, 1)
    sums = rows.logsumexp(dim=-1)
    return SampledDraft(rows, sums, torch.full_like(sums, -torch.inf), 1.0)
