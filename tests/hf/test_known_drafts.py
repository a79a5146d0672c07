"""Drafts that a call brings: its prediction, and what its grammar forces; see known_drafts.py."""

import numpy as np
import pytest
import torch
from specdec_hf import SpeculativeDecoder, generate
from specdec_hf.extras.known_drafts import MAX_KNOWN, continuation
from support import hf_models
from support.drafter_proof import BATCHES

MODEL = hf_models.build("llama", vocab_size=60)
PROMPTS, NEW = BATCHES[-1], 24
SAMPLED = {"do_sample": True, "rule": "match", "seed": [5, 6, 7], "temperature": 0.9}
NAMES = ["prompt_lookup", "auto", "none", "model"]
HOW = {"greedy": {"do_sample": False}, "sampled": SAMPLED}


def texts(how="greedy", model=MODEL, **options):
    inputs = hf_models.prompts(PROMPTS, vocab_size=model.config.vocab_size)
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, **HOW[how], **options}
    out = generate(model, **inputs, **options)
    return out.sequences[:, inputs["input_ids"].shape[1] :].tolist(), out.stats


def longest(text, prediction):
    """The place and the size of the longest match, over all places."""
    sizes = []
    for end in range(len(prediction)):
        pairs = zip(text[::-1], prediction[end::-1], strict=False)
        unlike = (n for n, (ours, given) in enumerate(pairs) if ours != given)
        sizes.append(min(next(unlike, len(text)), len(text), end + 1, MAX_KNOWN))
    size = max(sizes, default=0)
    ends = [end for end, one in enumerate(sizes) if one == size and size]
    return min(ends, key=lambda end: abs(end - len(text) + 1), default=-1), size


def test_a_prediction_goes_on_behind_the_longest_match():
    rng = np.random.default_rng(0)
    drafted = replaced = 0
    for _ in range(3000):
        prediction = rng.integers(0, 3, rng.integers(0, 40)).tolist()
        begin, most = rng.integers(len(prediction) + 1), int(rng.integers(1, 40))
        text = [*rng.integers(0, 3, rng.integers(3)), *prediction[begin:][: rng.integers(20)]]
        text = [*text, *rng.integers(0, 5, rng.integers(2))] or [1]
        end, size = longest(text, prediction)
        if size < min(2, len(text)):
            end, size = longest(text[:-1], prediction)
            end, size = end + 1, 4 if size >= 4 else 0
            replaced += size > 0
        elif size == len(text):
            size = max(size, 4)
        got = continuation(np.array(text), np.array(prediction, dtype=int), most).tolist()
        assert got == prediction[end + 1 :][: min(most, 2 * size)]
        drafted += bool(got)
    assert drafted > 1000
    assert replaced > 100


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("drafter", ["prompt_lookup", "auto", None, MODEL], ids=NAMES)
def test_a_prediction_leaves_the_text_and_takes_fewer_rounds(how, drafter):
    """The right one, one with an edit, none, an empty one, and one that is wrong throughout."""
    want, plain = texts(how, drafter=None)
    edited = [*want[1][:9], 3, 3, *want[1][11:]]
    wrong = [token + 1 if token < 59 else 0 for token in want[2]]
    for given in ([want[0], edited, None], [[], want[1], wrong], [wrong, wrong, want[2]]):
        got, stats = texts(how, drafter=drafter, prediction=given)
        assert got == want
        for told, one in zip(given, stats.sequences, strict=True):
            assert (one.accepted_predicted > 0) == (bool(told) and told != wrong)
            assert one.accepted_predicted <= one.predicted <= one.drafted
            assert one.predicted <= 8 or told != wrong
    got, stats = texts(how, drafter=drafter, prediction=want)
    assert got == want
    assert stats.rounds <= (8 if drafter == "auto" else 10) < plain.rounds
    assert stats.together.accepted_predicted == stats.together.predicted > 3 * (NEW - 11)


@pytest.mark.parametrize("cache", ["spec", "aligned", "dynamic"])
def test_no_cache_is_too_small_for_a_prediction(cache):
    """Some of its layers see a window alone, and the last drafts are cut to what the text has."""
    model = hf_models.build("mistral", vocab_size=60, sliding_window=16)
    long = texts(model=model, drafter=None, max_new_tokens=60)[0]
    for most in (1, 2, 24, 60):
        settings = {"drafter": None, "cache": cache, "max_new_tokens": most}
        got, stats = texts(model=model, prediction=long, **settings)
        assert got == [text[:most] for text in long]
        assert stats.rounds < 12
        assert stats.together.predicted == stats.together.accepted_predicted


def test_a_text_ends_within_its_prediction():
    want, _ = texts(drafter=None)
    for end in (want[0][7], want[1][12]):
        cut, _ = texts(drafter=None, eos_token_id=end, pad_token_id=0)
        got, _ = texts(prediction=want, eos_token_id=end, pad_token_id=0)
        assert got == cut


@pytest.mark.parametrize("drafter", ["prompt_lookup", None], ids=["prompt_lookup", "none"])
def test_sequences_bring_their_own_into_a_batch(drafter):
    want, _ = texts("sampled", drafter=None)
    prompts = hf_models.prompts(PROMPTS, vocab_size=60)
    calls = []
    for b, (ids, mask) in enumerate(zip(*prompts.values(), strict=True)):
        calls.append({
            "input_ids": ids[mask.bool()][None], "seed": SAMPLED["seed"][b],
            "max_new_tokens": NEW, "do_sample": True, "temperature": 0.9,
            "prediction": None if b == 1 else want[b],
        })  # fmt: skip
    calls = [calls[1], calls[0], calls[2]] if drafter is None else calls  # the first has none
    order = [SAMPLED["seed"].index(call["seed"]) for call in calls]
    first, waiting = calls[0], calls[1:]
    decoder = SpeculativeDecoder(drafter, rule="match", guard=False)
    found, predicted = [[] for _ in calls], [0] * len(calls)
    for step in decoder.stream(
        MODEL, **first, source=lambda running: waiting.pop(0) if waiting else None
    ):
        found[order[step.sequence]] += step.tokens
        predicted[order[step.sequence]] += step.predicted * sum(step.from_draft)
        assert step.drafted >= sum(step.from_draft)
    assert found == want
    assert predicted[1] == 0
    assert min(predicted[0], predicted[2]) > NEW - 12


def test_the_hugging_face_way_in_takes_a_prediction():
    inputs = hf_models.prompts(PROMPTS[:1], vocab_size=60)
    plain = MODEL.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    text = plain[0, inputs["input_ids"].shape[1] :]
    for given in (text, [text.tolist()], text.tolist(), text.numpy()):
        got = MODEL.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True,
            custom_generate=SpeculativeDecoder(drafter=None), prediction=given,
        )  # fmt: skip
        assert torch.equal(got.sequences, plain)
        assert got.stats.rounds < 12


WRONG = [
    ("text", TypeError, "prediction must be token ids, or a list of them, got 'text'"),
    ([[1], [2]], ValueError, "prediction must have a text for each of 3 prompts, got 2"),
    ([1, 2], ValueError, "prediction must have a text for each of 3 prompts, got 1"),
    (torch.tensor([0.5, 1.0, 2.0]), TypeError, "prediction must be token ids, got [0.5, 1.0, 2.0]"),
    ([[1, [2]], None, None], TypeError, "prediction must be token ids, got [1, [2]]"),
    ([[1], [0.5], None], TypeError, "prediction must be token ids, got [0.5]"),
    ([[1], [60], None], ValueError, "prediction must hold token ids in [0, 60), got 60"),
    ([[1], [-1], None], ValueError, "prediction must hold token ids in [0, 60), got -1"),
    ([[1] * 10**5, None, None], ValueError, "prediction must have at most"),
]


@pytest.mark.parametrize(("given", "kind", "words"), WRONG, ids=str)
def test_a_wrong_prediction_is_refused_by_name(given, kind, words):
    with pytest.raises(kind) as error:
        texts(prediction=given)
    assert words in str(error.value)


def test_a_prediction_is_refused_with_beams():
    with pytest.raises(ValueError, match="prediction must be None with num_beams=2"):
        texts(prediction=[[1], None, None], num_beams=2)
