"""The drafter of a call that names none: what it chooses, and that the text is plain decoding's."""

import inspect
import json
import sys

import pytest
import torch
from specdec_hf import AutoDrafter, SpeculativeDecoder, SuffixAutomatonDrafter, generate
from specdec_hf.cli.options import CLI_NUM_ASSISTANT_TOKENS, DEFAULT_DRAFTERS
from specdec_hf.drafting.registry import AUTO
from specdec_hf.loop.streaming import run_stream
from specdec_hf.options import Options
from support import encoder_models, hf_models
from support.cli_models import folder, invoke, says  # noqa: F401
from support.hf_models import one_thread  # noqa: F401  # autouse here
from transformers import GenerationConfig

from bench.tiny_models.build import build

NEW = 16
LENGTHS = [(9,), (9, 4, 12)]
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 5, "seed": 3}
CHAINS = "drafter 'auto' drafts chains with suffix_automaton: "
SCHEDULE = "--num-assistant-tokens-schedule"
NOTHING = "drafter 'auto' drafts nothing: "


@pytest.fixture(scope="module")
def model():
    """Of few tokens, so that its texts repeat themselves."""
    return hf_models.build("llama", vocab_size=11)


def run(model, lengths=(9,), **kwargs):
    inputs = hf_models.prompts(lengths, vocab_size=11)
    how = {"max_new_tokens": NEW, "guard": False, "return_dict_in_generate": True, **kwargs}
    return generate(model, **inputs, **how)


def choice_in(notes):
    return [note for note in notes if AUTO in note]


def test_the_default_of_every_entry_is_auto(model):
    for function in (generate, SpeculativeDecoder, Options):
        assert inspect.signature(function).parameters["drafter"].default == AUTO
    assert DEFAULT_DRAFTERS == (AUTO,)
    assert run(model).stats.drafter == AUTO
    inputs = hf_models.prompts((9,), vocab_size=11)
    kwargs = {"max_new_tokens": 3, "return_dict_in_generate": True}
    hooked = model.generate(**inputs, **kwargs, custom_generate=SpeculativeDecoder())
    _, streamed = run_stream(SpeculativeDecoder().stream(model, **inputs, **kwargs), lambda _: None)
    assert hooked.stats.drafter == streamed.stats.drafter == AUTO


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("lengths", LENGTHS, ids=["alone", "ragged"])
@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_that_of_plain_decoding(model, lengths, how):
    out, plain = run(model, lengths, **how), run(model, lengths, **how, drafter=None)
    assert out.stats.drafter == AUTO
    assert out.stats.accepted > 0
    assert out.stats.notes == []
    assert out.sequences.tolist() == plain.sequences.tolist()


TREES_REFUSED = {
    "aligned": {"cache": "aligned"},
    "dynamic": {"cache": "dynamic"},
    "num_assistant_tokens": {"num_assistant_tokens": 3},
    "generation_config": {
        "generation_config": GenerationConfig(num_assistant_tokens=3, pad_token_id=0)
    },
    "schedule": {"num_assistant_tokens_schedule": "heuristic"},
    "token": {"rule": "token"},
    "block": {"rule": "block"},
}


# `make test` has one of each of the three places that refuse: the cache, the number, the rule.
IN_TEST = ("aligned", "num_assistant_tokens", "block")


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in IN_TEST else pytest.mark.full) for c in TREES_REFUSED],
)
def test_calls_that_refuse_trees_get_chains(model, case):
    lengths, options = LENGTHS[1], {**GREEDY, **TREES_REFUSED[case], "max_new_tokens": 8}
    with pytest.raises(ValueError) as refused:
        run(model, lengths, **options, drafter=AutoDrafter())
    out = run(model, lengths, **options)
    assert out.stats.drafter == "suffix_automaton"
    assert choice_in(out.stats.notes) == [CHAINS + str(refused.value)]
    assert out.stats.accepted > 0
    assert out.sequences.tolist() == run(model, lengths, **options, drafter=None).sequences.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"assistant_confidence_threshold": 0.3},
        {"assistant_confidence_threshold": 0.3, "num_assistant_tokens_schedule": "confidence"},
        {"assistant_confidence_threshold": 7.0},
    ],
    ids=["alone", "schedule", "out of range"],
)
def test_a_threshold_is_for_drafters_that_were_named(model, options):
    out, plain = (run(model, **GREEDY, **options, drafter=drafter) for drafter in (AUTO, None))
    assert out.sequences.tolist() == plain.sequences.tolist()
    if len(options) > 1 or options["assistant_confidence_threshold"] > 1:
        with pytest.raises(ValueError):
            run(model, **GREEDY, **options, drafter="suffix_automaton")


def test_traced_calls_get_the_trees_of_others(model):
    inputs, traced = hf_models.prompts((9,), vocab_size=11), []
    kwargs = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    plain, out = (
        model.generate(**inputs, **kwargs, custom_generate=SpeculativeDecoder(guard=False, **more))
        for more in ({}, {"trace": traced.append})
    )
    assert out.stats.drafter == plain.stats.drafter == AutoDrafter().name
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert len(traced) == out.stats.rounds
    assert any(r.parents is not None for r in traced)


def test_sampled_chains_have_the_text_of_plain_decoding_with_rule_match(model):
    """So the guard may pause them, as it may trees."""
    lengths = LENGTHS[1]
    out = run(model, lengths, **SAMPLED, cache="aligned")
    plain = run(model, lengths, **SAMPLED, cache="aligned", drafter=None, rule="match")
    assert (out.stats.drafter, out.stats.rule) == ("suffix_automaton", "match")
    (note,) = choice_in(out.stats.notes)
    assert note.startswith("drafter 'auto' drafts chains with suffix_automaton and rule 'match': ")
    assert out.stats.accepted > 0
    assert out.sequences.tolist() == plain.sequences.tolist()


@pytest.mark.parametrize("name", ["t5", pytest.param("BloomForCausalLM", marks=pytest.mark.full)])
def test_models_that_take_no_trees_get_chains(name):
    lengths = LENGTHS[1]
    if name == "t5":
        model, inputs = encoder_models.tiny(name), encoder_models.texts(lengths)
    else:
        model, inputs = build(name), hf_models.prompts(lengths, vocab_size=11)
    kwargs = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    with pytest.raises(ValueError, match="cannot be used with a tree of drafts") as refused:
        generate(model, **inputs, **kwargs, drafter=AutoDrafter())
    out = generate(model, **inputs, **kwargs)
    assert out.stats.drafter == "suffix_automaton"
    assert choice_in(out.stats.notes) == [CHAINS + str(refused.value)]
    plain = generate(model, **inputs, **kwargs, drafter=None)
    assert out.sequences.tolist() == plain.sequences.tolist()


def embedded(model):
    ids = torch.arange(1, 7)[None]
    return {"inputs_embeds": model.get_input_embeddings()(ids).detach()}


def test_what_takes_no_drafts_is_decoded_plainly(model):
    mamba, prompt = build("MambaForCausalLM"), hf_models.prompts((9,), vocab_size=11)
    for target, inputs, drafters in (
        (mamba, prompt, (AutoDrafter(), SuffixAutomatonDrafter())),
        (model, {**prompt, "num_beams": 2}, (AutoDrafter(), SuffixAutomatonDrafter())),
        (model, embedded(model), ()),  # other models refuse them
    ):
        kwargs = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
        for drafter in drafters:
            with pytest.raises(ValueError):
                generate(target, **inputs, **kwargs, drafter=drafter)
        out = generate(target, **inputs, **kwargs)
        assert out.stats.drafter == "none"
        (note,) = choice_in(out.stats.notes)
        assert note.startswith(NOTHING)
        plain = generate(target, **inputs, **kwargs, drafter=None)
        assert out.sequences.tolist() == plain.sequences.tolist()


def test_without_the_native_module_that_copies_need_text_is_decoded_plainly(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "specdec_host", None)
    with pytest.raises(ImportError):
        run(model, drafter="suffix_automaton")
    out = run(model)
    assert out.stats.drafter == "none"
    assert choice_in(out.stats.notes)[0].startswith(NOTHING)


def test_the_tree_is_sized_by_schedule_optimal_and_chains_are_not(model):
    def lengths_chosen(**options):
        rounds = run(model, **GREEDY, **options).stats.round_log[1:]
        return ["gamma" in one.schedule for one in rounds]

    assert all(lengths_chosen())
    assert not any(lengths_chosen(num_assistant_tokens_schedule="constant"))
    assert not any(lengths_chosen(cache="aligned"))


def test_half_precision_leaves_one_note_where_forwards_round_otherwise():
    model = hf_models.build("llama", vocab_size=11).to(torch.bfloat16)

    def notes(**options):
        found = run(model, **GREEDY, **options, max_new_tokens=4).stats.notes
        return [note for note in found if "rounds unlike" in note]

    for options in ({"compile": False}, {"cache": "aligned"}):
        (note,) = notes(**options)
        assert "bfloat16" in note
    assert not notes(drafter=None, compile=False)
    assert not notes()


@pytest.mark.parametrize(
    "chains",
    [("--gamma", 3), pytest.param((SCHEDULE, "heuristic"), marks=pytest.mark.full)],
)
def test_options_that_trees_refuse_let_the_default_drafter_draft_chains(folder, tmp_path, chains):  # noqa: F811
    path = tmp_path / "out.json"
    result = invoke(
        "generate", "--model", folder, "--prompt", "one two one two one", "--max-new-tokens", 5,
        *chains, "--json", path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert says(result, "drafts chains with suffix_automaton")
    report = json.loads(path.read_text())
    assert report["summary"]["drafter"] == "suffix_automaton"
    chosen = chains[1] if chains[0] == "--gamma" else CLI_NUM_ASSISTANT_TOKENS
    assert report["num_assistant_tokens"] == chosen
    if chains[0] == SCHEDULE:
        assert says(result, chains[0].strip("-").replace("-", "_"))
