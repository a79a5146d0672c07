"""Texts that follow a grammar, with drafts and without, in the loop and in the server."""

import copy
import json
import re
import sys

import numpy as np
import pytest
import torch
from specdec_hf import SpeculativeDecoder, generate
from specdec_hf.extras.grammar import (
    Grammar,
    GrammarLimitError,
    GrammarProcessor,
    GrammarTokenizer,
    allowed,
    bits_of_drafts,
)
from specdec_hf.extras.penalties import PresenceFrequencyPenalty
from support import text_server
from support.text_server import DRAFTER, TOKENIZER, serving
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

pytest.importorskip("llguidance", reason="needs the extra [grammar]")

END = TOKENIZER.eos_token_id
MODEL = copy.deepcopy(text_server.MODEL)
MODEL.generation_config.eos_token_id = END
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
PATTERN = "(red|green|blue)( (red|green|blue)){2}"
PROMPTS = ["the cat sat", "a dog"]


@pytest.fixture(scope="module")
def reader():
    return GrammarTokenizer(TOKENIZER, MODEL.config.vocab_size, [END])


def encoded(texts):
    return TOKENIZER(texts, return_tensors="pt", padding=True, padding_side="left")


def texts(out, width):
    return [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in out[:, width:]]


@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True, "seed": 4}])
@pytest.mark.parametrize(
    "drafter", [DRAFTER, "prompt_lookup", pytest.param("default", id="default"), None], ids=str
)
def test_texts_follow_the_grammar_and_are_those_without_drafts(reader, drafter, how):
    inputs = encoded(PROMPTS)
    width = inputs["input_ids"].shape[1]
    rule = {"rule": "match"} if how["do_sample"] else {}
    given = {} if drafter == "default" else {"drafter": drafter}
    for grammar, right in (
        (Grammar.json_schema(reader, SCHEMA), lambda t: json.loads(t).keys() == {"name", "old"}),
        (Grammar.regex(reader, PATTERN), lambda t: re.fullmatch(PATTERN, t)),
    ):
        options = {**inputs, **how, **rule, "max_new_tokens": 60, "pad_token_id": END}
        listed = [GrammarProcessor(grammar, width)]
        out = generate(MODEL, **options, **given, logits_processor=listed)
        assert all(right(text) for text in texts(out, width))
        plain = generate(MODEL, **options, drafter=None, logits_processor=listed)
        assert torch.equal(out, plain)


def test_the_greedy_text_is_that_of_transformers_and_scores_are_masked(reader):
    inputs = encoded(PROMPTS[:1])
    width = inputs["input_ids"].shape[1]
    grammar = Grammar.regex(reader, PATTERN)
    options = {
        **inputs, "do_sample": False, "max_new_tokens": 30, "pad_token_id": END,
        "output_scores": True, "return_dict_in_generate": True,
    }  # fmt: skip
    want = MODEL.generate(**options, logits_processor=[GrammarProcessor(grammar, width)])
    got = generate(
        MODEL, **options, drafter=DRAFTER, logits_processor=[GrammarProcessor(grammar, width)]
    )
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got.scores, want.scores, strict=True):
        assert torch.equal(ours == -torch.inf, theirs == -torch.inf)


@pytest.mark.parametrize("forced", [True, False])
def test_drafts_that_the_grammar_forbids_are_rejected_and_others_accepted(
    reader, forced, monkeypatch
):
    """The drafter proposes the right text with a wrong token in it; forced tokens are right."""
    if not forced:
        monkeypatch.setattr(GrammarProcessor, "forced", lambda *_: [])
    grammar = Grammar.regex(reader, "abcabcabc")
    inputs = encoded(["abcabdabc"])
    follows = GrammarProcessor(grammar, inputs["input_ids"].shape[1])
    options = {
        **inputs, "logits_processor": [follows], "max_new_tokens": 20, "temperature": 1.3,
        "do_sample": True, "seed": 1, "pad_token_id": END, "return_dict_in_generate": True,
    }  # fmt: skip
    assert generate(MODEL, **options, drafter=None).stats.drafted == 0
    out = generate(MODEL, **options, drafter="prompt_lookup")
    assert texts(out.sequences, inputs["input_ids"].shape[1]) == ["abcabcabc"]
    assert 0 < out.stats.accepted <= out.stats.drafted
    assert forced == (out.stats.accepted == out.stats.drafted == out.stats.new_tokens - 2)


def test_a_limit_of_llguidance_ends_the_text_that_reaches_it_with_the_reason(reader):
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(50)}}
    grammar = Grammar.json_schema(reader, {"anyOf": [{**many, "title": str(i)} for i in range(50)]})
    follows = GrammarProcessor(grammar, 0)
    brace = TOKENIZER("{")["input_ids"][0]
    for _ in range(2):  # the error is not kept
        assert follows.words([]).any()
        with pytest.raises(GrammarLimitError, match="cannot be followed further: Parser Error: Cu"):
            follows.words([brace])
    out = np.full((2, len(follows.words([]))), -1, np.int32)
    bits_of_drafts(follows, [], [brace], [-1], [END], out)
    assert [row.any() for row in out] == [True, False]


def test_batches_go_on_where_one_text_has_ended(reader):
    inputs = encoded(PROMPTS)
    width = inputs["input_ids"].shape[1]
    options = {
        **inputs, "do_sample": False, "max_new_tokens": 40, "pad_token_id": END,
        "output_scores": True, "return_dict_in_generate": True,
    }  # fmt: skip
    grammar = Grammar.regex(reader, "(c|dddddd)")
    want = MODEL.generate(**options, logits_processor=[GrammarProcessor(grammar, width)])
    got = generate(
        MODEL, **options, drafter=DRAFTER, logits_processor=[GrammarProcessor(grammar, width)]
    )
    assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("vocab", [258, 288])  # within a word of the mask, and at its end
def test_a_mask_has_a_bit_for_each_token(vocab):
    grammar = Grammar.regex(GrammarTokenizer(TOKENIZER, vocab, [END]), "a+")
    words = GrammarProcessor(grammar, 0).words([TOKENIZER("a")["input_ids"][0]])
    assert len(words) == 9
    assert allowed(words, vocab)[[TOKENIZER("b")["input_ids"][0], END]].tolist() == [False, True]


def test_a_processor_reads_texts_in_any_order(reader):
    follows = GrammarProcessor(Grammar.regex(reader, "(ab|ac)d"), 0)
    a, b, c, d = (TOKENIZER(x)["input_ids"][0] for x in "abcd")
    first = follows.words([a]).tolist()
    assert follows.follows([a, b, d])
    assert not follows.follows([a, d])
    assert follows.follows([a, c])
    assert follows.words([a]).tolist() == first
    with pytest.raises(RuntimeError, match="the text must follow its grammar, got tokens"):
        follows.words([a, d])


WRONG = [
    ("json_schema", {"type": "nothing"}, "does not compile"),
    ("json_schema", {"type": "string", "minLength": 5, "maxLength": 2}, "compile|no text follows"),
    ("regex", "(a", "does not compile"),
    ("lark", "start: other", "does not compile"),
]


@pytest.mark.parametrize(("kind", "source", "words"), WRONG, ids=str)
def test_a_grammar_that_no_text_follows_is_refused_with_the_reason(reader, kind, source, words):
    with pytest.raises(ValueError, match=words) as error:
        getattr(Grammar, kind)(reader, source)
    assert "\n" not in str(error.value)


def test_without_llguidance_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(ImportError, match=r"pip install 'specdec-kernels\[grammar\]'"):
        GrammarTokenizer(TOKENIZER, MODEL.config.vocab_size, [END])


def test_model_generate_takes_the_decoder_with_a_grammar(reader):
    inputs = encoded(PROMPTS[:1])
    follows = GrammarProcessor(Grammar.json_object(reader), inputs["input_ids"].shape[1])
    out = MODEL.generate(
        **inputs, custom_generate=SpeculativeDecoder(drafter=DRAFTER), logits_processor=[follows],
        max_new_tokens=12, do_sample=False, pad_token_id=END,
    )  # fmt: skip
    assert texts(out, inputs["input_ids"].shape[1])[0].startswith("{")


# The server.


@pytest.fixture(scope="module")
def client():
    with serving(model=MODEL) as (client, _):
        yield client


CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
JSON = {"type": "json_object"}
ASKED = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 60, "seed": 2}


def content(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.server
def test_answers_follow_their_format(client):
    schema = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
    answer = client.post(CHAT, json={**ASKED, "response_format": schema})
    assert json.loads(content(answer)).keys() == {"name", "old"}
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    regex = {"type": "regex", "pattern": PATTERN}
    assert re.fullmatch(
        PATTERN, content(client.post(CHAT, json={**ASKED, "response_format": regex}))
    )
    free = {**ASKED, "response_format": JSON}
    assert content(client.post(CHAT, json=free)).startswith("{")
    asked = {"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": PATTERN}}}
    text = client.post(GENERATE, json=asked).json()["generated_text"]
    assert re.fullmatch(PATTERN, text)


REFUSED = [
    (
        {"type": "xml"},
        "must be an object with a type, one of text, json_object, json_schema, regex",
    ),
    ({"type": "json_schema"}, "must have json_schema alone beside the type json_schema"),
    ({"type": "json_schema", "json_schema": {"name": "a"}}, "json_schema must have a schema"),
    ({"type": "regex", "pattern": ""}, "must have a regular expression of at least one character"),
    (
        {"type": "regex", "pattern": "(a"},
        "must be followed by some text: the grammar does not comp",
    ),
    ({"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}, "does not compile"),
]


@pytest.mark.server
@pytest.mark.parametrize(("given", "words"), REFUSED, ids=str)
def test_a_format_that_is_none_is_refused_and_the_server_goes_on(client, given, words):
    answer = client.post(CHAT, json={**ASKED, "response_format": given})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "response_format")
    assert words in error["message"]
    assert content(client.post(CHAT, json=ASKED))


@pytest.mark.server
@pytest.mark.parametrize(("field", "value", "more"), [
    ("min_tokens", 2**63, {}), ("min_tokens", 99, {}), ("min_tokens", 2, {"response_format": JSON}),
    ("repetition_penalty", 1e-50, {}), ("logit_bias", {"05": 1}, {}),
    ("response_format", {"type": "regex", "pattern": "(?=a)b"}, {}),
], ids=str)  # fmt: skip
def test_what_no_text_can_have_is_refused_by_name(client, field, value, more):
    given = {"prompt": "a", "max_tokens": 4, field: value, **more}
    answer = client.post(COMPLETE, json=given)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert "must" in answer.json()["error"]["message"]


@pytest.mark.server
def test_penalties_and_biases_change_the_text_as_they_do_in_generate(client):
    plain = {"prompt": "the cat", "max_tokens": 12, "temperature": 0}
    inputs = encoded(["the cat"])
    width = inputs["input_ids"].shape[1]
    best = int(MODEL(**inputs).logits[0, -1].argmax())
    for more, processor in (
        ({"logit_bias": {str(best): -100}}, SequenceBiasLogitsProcessor({(best,): -100.0})),
        ({"repetition_penalty": 1.5}, RepetitionPenaltyLogitsProcessor(1.5)),
        ({"frequency_penalty": 1.5}, PresenceFrequencyPenalty(0.0, 1.5, width)),
        ({"presence_penalty": 1.5}, PresenceFrequencyPenalty(1.5, 0.0, width)),
    ):
        got = client.post(COMPLETE, json={**plain, **more}).json()["choices"][0]["text"]
        out = MODEL.generate(
            **inputs, max_new_tokens=12, do_sample=False, logits_processor=[processor],
            pad_token_id=END,
        )  # fmt: skip
        assert got == texts(out, width)[0]
    over = {**plain, "logit_bias": {"9999": 1}}
    assert (
        "must name token ids below" in client.post(COMPLETE, json=over).json()["error"]["message"]
    )


@pytest.mark.server
def test_an_end_may_be_ignored_or_made_to_wait(client):
    asked = {"prompt": "the cat", "max_tokens": 40, "seed": 1, "temperature": 1.5}
    ending = {**asked, "logit_bias": {str(END): 100}}
    answers = {
        name: client.post(COMPLETE, json={**ending, **more}).json()
        for name, more in (("", {}), ("min", {"min_tokens": 7}), ("all", {"ignore_eos": True}))
    }
    counts = {name: one["usage"]["completion_tokens"] for name, one in answers.items()}
    assert counts == {"": 1, "min": 8, "all": 40}
    free = client.post(COMPLETE, json={**asked, "ignore_eos": True, "response_format": JSON})
    assert "must not be given with a format" in free.json()["error"]["message"]
    assert answers["all"]["choices"][0]["finish_reason"] == "length"


@pytest.mark.server
@pytest.mark.parametrize("drafter", [None, DRAFTER], ids=["alone", "drafts"])
def test_a_prediction_is_drafted_and_counted(drafter):
    """It has an edit; in a stream and whole, of one choice and of three."""
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 60, "seed": 5}
    asked["response_format"] = {"type": "regex", "pattern": "[c-h]{40}"}  # so that it is text
    with serving(model=MODEL, drafter=drafter) as (client, _):
        plain, text = (answer := client.post(CHAT, json=asked)).json(), content(answer)
        edited = {"type": "content", "content": f"{text[:20]}i{text[21:]}"}
        got = client.post(CHAT, json=asked | {"prediction": edited}).json()
        assert got["choices"] == plain["choices"]
        counts = got["usage"]["completion_tokens_details"]
        assert counts["accepted_prediction_tokens"] > 25
        assert counts["rejected_prediction_tokens"] < 25
        assert got["speculation"]["rounds"] < 15
        parts = {"type": "content", "content": [{"type": "text", "text": edited["content"]}]}
        more = {"stream": True, "stream_options": {"include_usage": True}, "n": 3}
        streamed = client.post(CHAT, json=asked | more | {"prediction": parts}).text
        last = json.loads(streamed.split("\n\n")[-3].removeprefix("data: "))
        accepted = last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
        assert accepted >= counts["accepted_prediction_tokens"]
        for wrong, words in (
            ("text", "must be an object of the type content and its content, got 'text'"),
            ({"type": "content", "content": 3}, "must have a string or parts of type text"),
            (
                {"type": "content", "content": "ab " * 400},
                "must have at most 256 tokens, the model's context, got 1200",
            ),
        ):
            answer = client.post(CHAT, json=asked | {"prediction": wrong})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "prediction"), error
            assert words in error["message"]
