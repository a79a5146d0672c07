"""The text of a queued sequence is that of `generate` for its prompt alone, whatever is beside it.

Its call is its own: what Transformers derives of the length of a batch or of its longest prompt,
and what one sequence raises, is not that of the others.
"""

import asyncio
import functools

import pytest
import torch
from specdec_hf import PromptLookupDrafter, SpeculativeDecoder, generate
from specdec_hf.request.unsupported import HONOURED
from specdec_serve.batch_queue import REFUSED, BatchQueue
from support import hf_models

MODEL = hf_models.build("llama", vocab_size=11)
SECONDS = 60
PROMPTS = ([5, 6, 7, 5, 6, 2, 9], [8], [9, 4, 9], [1, 2, 3, 1, 2, 3, 1, 2], [4, 4])
ASKED = (
    {"max_new_tokens": 9, "seed": 5},
    {"max_new_tokens": 14, "seed": 6, "temperature": 0.7, "top_k": 5},
    {"max_new_tokens": 12, "seed": 7, "temperature": 0.0},
    {"max_new_tokens": 6, "seed": 8, "top_p": 0.9},
    {"max_new_tokens": 15, "seed": 11, "temperature": 0.4},
)
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
FIELDS = {
    "min_length": 13, "min_new_tokens": 5, "repetition_penalty": 1.9,
    "encoder_repetition_penalty": 1.8, "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 1, "bad_words_ids": [[3], [5, 6], [0, 4]],
    "renormalize_logits": True, "forced_bos_token_id": 7, "forced_eos_token_id": 6,
    "remove_invalid_values": True, "exponential_decay_length_penalty": (2, 1.6),
    "suppress_tokens": [2, 8], "begin_suppress_tokens": [1, 2, 4, 6, 8, 9],
    "sequence_bias": [[[0], 2.0], [[5, 6], 4.0], [[9, 4], 3.0]], "eos_token_id": [3, 6],
    "pad_token_id": 4, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.6, "max_length": 11, "max_new_tokens": 2,
    "do_sample": False, "temperature": 0.2, "top_k": 1, "top_p": 0.1, "min_p": 0.9,
    "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
    "output_hidden_states": True,
}  # fmt: skip
ENDING = {  # fields that need an end to do something
    "min_length", "min_new_tokens", "exponential_decay_length_penalty", "begin_suppress_tokens",
    "pad_token_id",
}  # fmt: skip


def fields_for(*names):
    """A generation config in which these fields do something."""
    fields = {name: FIELDS[name] for name in names}
    if ENDING & fields.keys():
        fields["eos_token_id"] = FIELDS["eos_token_id"]
    if "renormalize_logits" in names:
        fields["repetition_penalty"] = 1.5
    if any(name.startswith("output_") for name in names):
        fields["return_dict_in_generate"] = True
    return fields


# What has no effect without beams, without an encoder, or without another field that is refused.
WITHOUT_EFFECT = {
    "early_stopping", "length_penalty", "decoder_start_token_id", "max_matching_ngram_size"
}  # fmt: skip
# How sequences come together: joins with and without drafts, and batches that none can join.
WAYS = {
    "joins": {"drafter": None},
    "joins, drafts": {"drafter": "suffix_automaton"},
    "joins, trees": {"drafter": "auto"},
    "static by its drafter": {"drafter": "lookahead"},
    "static by its cache": {"drafter": None, "cache": "aligned"},
    "static, one cache each": {"drafter": "prompt_lookup", "cache": "dynamic"},
    "static by its schedule": {
        "drafter": "prompt_lookup", "num_assistant_tokens_schedule": "heuristic",
    },
}  # fmt: skip


def alone(k, model=MODEL):
    ids = torch.tensor([PROMPTS[k]])
    out = generate(
        model, ids, attention_mask=torch.ones_like(ids), drafter=None, rule="match", do_sample=True,
        return_dict_in_generate=True, **NEUTRAL | ASKED[k],
    )  # fmt: skip
    reason = out.stats.sequences[0].stop_reason
    return out.sequences[0, len(PROMPTS[k]) :].tolist(), reason


async def read(sequence):
    """The tokens of a sequence, and why it ended: an error as its text."""
    tokens, reason = [], ""
    try:
        async for step in sequence:
            tokens += step.tokens
            reason = step.finished
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    return tokens, reason


def queued(model=MODEL, batch_size=3, chunk=4, requests=None, **options):
    if requests is None:
        requests = list(zip(PROMPTS, ASKED, strict=True))

    async def decode():
        decoder = SpeculativeDecoder(rule="match", **options)
        async with BatchQueue(model, decoder, batch_size, prefill_chunk_size=chunk) as queue:
            sequences = [queue.submit(prompt, **asked) for prompt, asked in requests]
            return [await read(sequence) for sequence in sequences]

    return asyncio.run(asyncio.wait_for(decode(), SECONDS))


@functools.cache
def plain():
    return [alone(k) for k in range(len(PROMPTS))]


def configure(monkeypatch, fields):
    for name, value in fields.items():
        monkeypatch.setattr(MODEL.generation_config, name, value)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_the_generation_config_means_what_it_means_alone(name, monkeypatch):
    unlike = plain()
    configure(monkeypatch, fields_for(name))
    ways = list(WAYS)
    turn = list(FIELDS).index(name)
    expected = [alone(k) for k in range(len(PROMPTS))]
    for way in ("joins", ways[1 + turn % 2], ways[3 + turn % 4]):
        if name == "assistant_confidence_threshold" and "lookup" in str(WAYS[way]):
            continue  # refused with drafts that have no confidence, as by `generate`
        assert queued(**WAYS[way]) == expected, way
    asked = {"max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p"}
    without = asked | {"remove_invalid_values"}
    if name not in without and not name.startswith(("return", "output", "num_a", "assistant")):
        assert expected != unlike  # the field does something


def test_every_field_that_generate_honours_is_proved_here_or_refused():
    assert FIELDS.keys() | REFUSED.keys() == HONOURED - WITHOUT_EFFECT


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *[({name: 3}, f"{name}=3 is not supported in a queue") for name in REFUSED],
        ({"guidance_scale": 2.0}, r"guidance_scale=2.0 is not supported \(from model.gen"),
        ({"cache_implementation": "static"}, "cache_implementation='static' is not supported"),
        ({"repetition_penalty": "2"}, "repetition_penalty must be a number, got '2'"),
        ({"forced_eos_token_id": 999}, "ForcedEOS.* of model.generation_config cannot be asked: I"),
        ({"sequence_bias": [[[999], 1.0]]}, "SequenceBias.* of model.generation_config cannot be"),
        ({"max_matching_ngram_size": 2}, "max_matching_ngram_size=2 needs drafter='prompt_lookup'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_generation_config_that_cannot_be_served_is_refused_before_a_request(
    fields, message, monkeypatch
):
    configure(monkeypatch, fields)
    with pytest.raises((ValueError, TypeError), match=message):
        BatchQueue(MODEL, SpeculativeDecoder(None, rule="match")).warm_up()


WIDE = hf_models.build("llama", vocab_size=301)  # few texts have a token in common


def broken(*tokens):
    """The wide model, whose logits are not finite behind these tokens."""
    model = hf_models.build("llama", vocab_size=301)
    with torch.no_grad():
        for token in tokens:
            model.get_input_embeddings().weight[token] = torch.nan
    return model


@functools.cache
def wide():
    """Texts of the wide model, the place of a token of the second that no other has, and one that
    none has."""
    texts = [alone(k, WIDE) for k in range(len(PROMPTS))]
    own = texts[1][0]
    others = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}.union(*(texts[k][0] for k in (0, 2, 3, 4)))
    place = next(n for n, token in enumerate(own) if n > 1 and token not in [*own[:n], *others])
    return texts, place, min({*range(301)} - others.union(own))


@pytest.mark.parametrize("compiles", [None, False], ids=["packed", "own forwards"])
@pytest.mark.parametrize("way", WAYS)
def test_a_sequence_whose_logits_are_not_finite_ends_alone(way, compiles):
    """In its prompt or in its text. All that ran ended with it.

    Its keys are not shared, and where a shorter sequence takes its place, masks multiply them by 0.
    """
    texts, place, wrong = wide()
    fails = ([wrong, 9, 4, 9] * 6, ASKED[2])
    late = ([9, 4, 9] * 6 + [wrong], ASKED[2])
    ordinary = list(zip(PROMPTS, ASKED, strict=True))
    requests = [ordinary[0], fails, *ordinary[1:3], late, fails, *ordinary[3:]]
    found = queued(
        broken(wrong, texts[1][0][place]), 3, requests=requests, compile=compiles, **WAYS[way]
    )
    lines = []
    for n in (1, 4, 5, 2):
        line = found[n][1]
        assert line.startswith("RuntimeError: logits of sequence "), line
        lines.append(line.split("at position ")[1])
    assert lines == [f"{n} are not finite" for n in (24, 19, 24, len(PROMPTS[1]) + place + 1)]
    assert [found[n][0] for n in (1, 4, 5)] == [[], [], []]
    assert found[2][0] == texts[1][0][: place + 1]
    assert [found[n] for n in (0, 3, 6, 7)] == [texts[k] for k in (0, 2, 3, 4)]


def stream(requests, size, way, model=WIDE):
    """The text of each request of a stream with a source, and the error that ended it."""
    waiting = [
        {"input_ids": torch.tensor([prompt]), "do_sample": True, **NEUTRAL, **asked, **own}
        for prompt, asked, own in requests
    ]
    first = waiting.pop(0)

    def source(running):
        return waiting.pop(0) if waiting and running < size else None

    decoder = SpeculativeDecoder(rule="match", **way)
    texts = [[] for _ in range(1 + len(waiting))]
    errors = [None] * len(texts)
    for step in decoder.stream(model, **first, source=source, prefill_chunk_size=4):
        texts[step.sequence] += step.tokens
        errors[step.sequence] = step.error
        assert (step.error is None) is (step.finished != "error")
    return texts, errors


class Planted(Exception):
    """What one request raises."""


def fails_behind(tokens):
    """A processor and a criterion, which raise where the text ends with these tokens."""

    def fails(input_ids, scores, **_):
        if input_ids[0, -len(tokens) :].tolist() == tokens:
            raise Planted
        return torch.zeros(1, dtype=torch.bool) if scores is None else scores

    return fails


def masks_all(input_ids, scores):
    return torch.full_like(scores, -torch.inf)


@pytest.mark.parametrize("way", WAYS)
def test_what_one_sequence_raises_ends_it_alone(way):
    texts, place, _ = wide()
    own = [
        {"logits_processor": [fails_behind(texts[0][0][1:3])]},
        {"stopping_criteria": [fails_behind([texts[1][0][place]])]},
        {},
        {"logits_processor": [fails_behind([2])]},
        {"logits_processor": [masks_all]},
    ]
    requests = list(zip(PROMPTS, ASKED, own, strict=True))
    size = 3 if way.startswith("joins") else 6
    found, errors = stream([*requests, (PROMPTS[0], ASKED[0], {})], size, WAYS[way])
    assert found[0] == texts[0][0][:3]
    assert found[1] == texts[1][0][: place + 1]
    assert found[2:] == [texts[2][0], [], [], texts[0][0]]
    kinds = [type(error).__name__ for error in errors]
    assert kinds == ["Planted", "Planted", "NoneType", "Planted", "RuntimeError", "NoneType"]


@pytest.mark.parametrize("way", ["joins, drafts", "joins, trees", "static by its schedule"])
def test_a_processor_that_raises_behind_a_rejected_draft_ends_nothing(way):
    """Plain decoding never asks it there."""
    texts = [alone(k) for k in range(len(PROMPTS))]
    raised = []

    def strict(k):
        def raises(input_ids, scores):
            new = input_ids[0, len(PROMPTS[k]) :].tolist()
            if new != texts[k][0][: len(new)]:
                raised.append(new)
                raise Planted
            return scores

        return {"logits_processor": [raises]}

    own = map(strict, range(len(PROMPTS)))
    found, errors = stream(zip(PROMPTS, ASKED, own, strict=True), 8, WAYS[way], MODEL)
    assert found == [text for text, _ in texts]
    assert errors == [None] * len(PROMPTS)
    assert raised


class CannotBegin(PromptLookupDrafter):
    def begin(self, call):
        if int(call.seeds[0]) == ASKED[2]["seed"]:
            raise MemoryError("planted")
        return super().begin(call)


def test_a_sequence_that_cannot_begin_ends_alone():
    """As where there is no memory for its prompt, its session or its drafts."""
    requests = [(prompt, asked, {}) for prompt, asked in zip(PROMPTS, ASKED, strict=True)]
    found, errors = stream(requests, 3, {"drafter": CannotBegin()})
    assert found == [[] if k == 2 else text for k, (text, _) in enumerate(wide()[0])]
    assert [str(error) for error in errors if error is not None] == ["planted"]
