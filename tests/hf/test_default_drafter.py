"""The drafter of a call that names none: what it chooses, and that the text is plain decoding's."""

import inspect
import itertools
import math
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from specdec_hf import AutoDrafter, SpeculativeDecoder, SuffixAutomatonDrafter, generate
from specdec_hf.cli.options import CLI_NUM_ASSISTANT_TOKENS, DEFAULT_DRAFTERS
from specdec_hf.drafting.registry import AUTO
from specdec_hf.heads import auto, shipped
from specdec_hf.heads.eagle3.files import save_head
from specdec_hf.heads.shipped import HEAD_FOLDER
from specdec_hf.lab.bench.configs import drafts_on_host
from specdec_hf.lab.bench.efficiency import predict
from specdec_hf.loop.streaming import run_stream
from specdec_hf.options import Options
from specdec_hf.schedules.benefit_guard import BenefitGuard
from specdec_hf.schedules.costs import MonotoneCost
from support import encoder_models, hf_models
from support.cli_models import folder, reported, says  # noqa: F401
from support.clocks import Clock
from support.heads import head_for
from transformers import GenerationConfig, StoppingCriteriaList

from bench.tiny_models.build import build

NEW = 16
LENGTHS = [(9,), (9, 4, 12)]
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 5, "seed": 3}
CHAINS = "drafter 'auto' drafts chains with suffix_automaton: "
SCHEDULE = "--num-assistant-tokens-schedule"
NOTHING = "drafter 'auto' drafts nothing: "


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
    # Another process that takes the machine's time could let the schedule draft nothing.
    out = run(model, lengths, **how, clock=Clock(0.25))
    plain = run(model, lengths, **how, drafter=None)
    assert out.stats.drafter == AUTO
    assert out.stats.accepted > 0
    assert out.stats.notes == []
    assert out.sequences.tolist() == plain.sequences.tolist()


TREES_REFUSED = {
    "aligned": {"cache": "aligned"},
    "num_assistant_tokens": {"num_assistant_tokens": 3},
    "generation_config": {
        "generation_config": GenerationConfig(num_assistant_tokens=3, pad_token_id=0)
    },
    "schedule": {"num_assistant_tokens_schedule": "heuristic"},
    "block": {"rule": "block"},
}


@pytest.mark.parametrize("case", TREES_REFUSED)
def test_calls_that_refuse_trees_get_chains(model, case):
    lengths, options = LENGTHS[1], {**GREEDY, **TREES_REFUSED[case], "max_new_tokens": 8}
    with pytest.raises(ValueError) as refused:
        run(model, lengths, **options, drafter=AutoDrafter())
    out = run(model, lengths, **options)
    assert out.stats.drafter == "suffix_automaton"
    assert choice_in(out.stats.notes) == [CHAINS + str(refused.value)]
    assert out.stats.accepted > 0
    assert out.sequences.tolist() == run(model, lengths, **options, drafter=None).sequences.tolist()


def test_no_drafts_at_all_are_plain_decoding_as_in_transformers_with_a_note(model):
    plain = run(model, **GREEDY, drafter=None).sequences.tolist()
    reason = "num_assistant_tokens is 0"
    for drafter, note in (
        (AUTO, f"drafter 'auto' drafts nothing: {reason}"),
        ("ngram", f"nothing is drafted: {reason}; drafter=None does without a drafter"),
    ):
        out = run(model, **GREEDY, drafter=drafter, num_assistant_tokens=0)
        assert (out.sequences.tolist(), out.stats.drafted) == (plain, 0)
        assert out.stats.notes == [note]
    assert run(model, **GREEDY, drafter=None, num_assistant_tokens=0).stats.notes == []


def test_a_threshold_is_for_drafters_that_were_named(model):
    plain, low = run(model, **GREEDY, drafter=None), {"assistant_confidence_threshold": 0.3}
    for options, refused in (
        (low, False),
        ({**low, "num_assistant_tokens_schedule": "confidence"}, True),
        ({"assistant_confidence_threshold": 7.0}, True),
    ):
        for drafter in (AUTO, None):
            out = run(model, **GREEDY, **options, drafter=drafter)
            assert out.sequences.tolist() == plain.sequences.tolist()
        if refused:
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


def test_what_takes_no_drafts_is_decoded_plainly(model):
    mamba, prompt = build("MambaForCausalLM"), hf_models.prompts((9,), vocab_size=11)
    embedded = model.get_input_embeddings()(torch.arange(1, 7)[None]).detach()
    for target, inputs, drafters in (
        (mamba, prompt, (AutoDrafter(), SuffixAutomatonDrafter())),
        (model, {**prompt, "num_beams": 2}, (AutoDrafter(), SuffixAutomatonDrafter())),
        (model, {"inputs_embeds": embedded}, ()),  # other models refuse them
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


def test_half_precision_leaves_one_note_where_the_text_depends_on_timing():
    model = hf_models.build("llama", vocab_size=11).to(torch.bfloat16)

    def notes(**options):
        found = run(model, **GREEDY, **options, max_new_tokens=4).stats.notes
        return [note for note in found if "rounds unlike" in note]

    for options in ({"compile": False}, {"cache": "aligned"}):
        (note,) = notes(**options, guard=True)
        assert "bfloat16" in note
        assert not notes(**options)
    assert not notes(drafter=None, compile=False)
    assert not notes(guard=True)


@pytest.mark.parametrize(
    "chains", [("--gamma", 3), pytest.param((SCHEDULE, "heuristic"), marks=pytest.mark.full)]
)
def test_options_that_trees_refuse_let_the_default_drafter_draft_chains(folder, tmp_path, chains):  # noqa: F811
    report, result = reported(
        tmp_path, "generate", "--model", folder, "--prompt", "one two one two one",
        "--max-new-tokens", 5, *chains,
    )  # fmt: skip
    assert says(result, "drafts chains with suffix_automaton")
    assert report["summary"]["drafter"] == "suffix_automaton"
    chosen = chains[1] if chains[0] == "--gamma" else CLI_NUM_ASSISTANT_TOKENS
    assert report["num_assistant_tokens"] == chosen
    if chains[0] == SCHEDULE:
        assert says(result, chains[0].strip("-").replace("-", "_"))


# What it merges where the model has a head.

COPYING = "prompt_lookup, suffix_automaton"


@pytest.fixture
def target(tmp_path):
    """A model that was loaded from a folder."""
    model = hf_models.build("llama", vocab_size=11)
    model.config._name_or_path = str(tmp_path)
    return model


def test_it_copies_where_there_is_no_head(target):
    drafter = AutoDrafter()
    out, forward = run(target, LENGTHS[1], drafter=drafter), MonotoneCost()
    forward.observe(1, 1.0)
    assert drafter.chosen == COPYING
    assert out.stats.drafter == "auto"
    assert out.stats.tree == "that of auto"
    assert predict([out.stats], forward, drafts_on_host=True).alpha is None, "it drafts trees"
    assert out.sequences.tolist() == run(target, LENGTHS[1], drafter=None).sequences.tolist()


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_head_beside_the_target_drafts_too(target, tmp_path, how):
    save_head(head_for(target, noise=0.1), tmp_path / HEAD_FOLDER, torch.float32)
    drafter = AutoDrafter()
    out = run(target, LENGTHS[1], drafter=drafter, **how)
    assert drafter.chosen == f"eagle3, {COPYING}"
    assert out.stats.accepted > 0
    # No draft has a part in the text: it is the target's own with the same noise.
    rule = {"rule": out.stats.rule} if how is SAMPLED else {}
    other = run(target, LENGTHS[1], drafter="token_recycling", **how, **rule)
    assert out.sequences.tolist() == other.sequences.tolist()


def test_a_head_is_read_once_and_again_where_it_was_replaced(target, tmp_path, monkeypatch):
    drafter, drafts, place = AutoDrafter(), [], tmp_path / HEAD_FOLDER
    for noise in (0.0, 3.0):
        if place.exists():
            place.rename(tmp_path / "old")
        save_head(head_for(target, noise=noise), place, torch.float32)
        drafts.append(run(target, drafter=drafter).stats.accepted)
    assert drafts[0] != drafts[1]
    run(target)
    monkeypatch.setattr(auto, "load_head", None)
    assert run(target).stats.drafted > 0


def of_another_model(place, _):
    save_head(head_for(hf_models.build("llama", vocab_size=13)), place)


def that_may_not_be_read(place, monkeypatch):
    place.mkdir()
    monkeypatch.setattr(Path, "iterdir", Mock(side_effect=PermissionError(13, "Permission denied")))


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (of_another_model, "a vocabulary of 13, got 11"),
        (lambda place, _: place.mkdir(), r"config\.json"),
        (that_may_not_be_read, "cannot read the head of the target: .*Permission denied"),
    ],
)
def test_a_default_call_goes_on_without_a_wrong_head(
    target, tmp_path, monkeypatch, fault, message, how
):
    before = run(target, **how)
    fault(tmp_path / HEAD_FOLDER, monkeypatch)
    with pytest.raises(ValueError, match=message) as refused:
        run(target, drafter=AutoDrafter(), **how)
    out = run(target, **how)
    assert (out.stats.drafter, out.stats.rule) == (AUTO, before.stats.rule)
    # Another note may say that the guard, which goes by the clock, let nothing be drafted.
    assert f"drafter 'auto' drafts without the model's head: {refused.value}" in out.stats.notes
    assert out.sequences.tolist() == before.sequences.tolist()
    assert drafts_on_host(AUTO, AutoDrafter(), target)


def test_no_head_drafts_on_an_accelerator(target, tmp_path, monkeypatch):
    """Its trees would be on the device, and cannot be merged with copied text."""
    save_head(head_for(target), tmp_path / HEAD_FOLDER, torch.float32)
    assert AutoDrafter().has_head(target)
    for device in ("cuda:0", "mps"):
        monkeypatch.setattr(type(target), "device", torch.device(device))
        assert not AutoDrafter().has_head(target)


def test_the_first_call_with_a_shipped_head_drafts_at_once(target, tmp_path, monkeypatch):
    """Drafts of other heads wait until the text has earned what they may lose.

    The texts end long before their budget, which the benefit guard goes by.
    """
    save_head(head_for(target, noise=0.1), tmp_path / HEAD_FOLDER, torch.float32)

    def soon(input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] > 40)

    ticks = itertools.count()  # each look at the clock takes as long, so that all rounds do

    def begins(lengths=(12,)):
        guard = BenefitGuard(max_loss=0.02)
        out = run(
            target, lengths, guard=guard, clock=lambda: float(next(ticks)),
            max_new_tokens=400, stopping_criteria=StoppingCriteriaList([soon]),
        )  # fmt: skip
        drafting = (n for n, record in enumerate(out.stats.round_log) if any(record.drafted))
        return next(drafting, math.inf)

    assert begins() > 2
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path)
    assert begins() == 2  # after one round to compare with
    assert begins((9, 4, 12)) > 2, "nothing is expected of it in a batch"


def test_a_row_without_a_token_is_an_error_with_drafts_and_without():
    """Where the model's own generation emits token 0, as docs/loop.md says."""
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))

    def forbid_all(ids, scores):
        return scores.new_full(scores.shape, -torch.inf) if ids.shape[1] == 12 else scores

    given = {"max_new_tokens": 6, "do_sample": False, "logits_processor": [forbid_all]}
    assert model.generate(**inputs, **given)[0, 12] == 0
    for drafter in ("auto", None, "suffix_automaton"):
        with pytest.raises(
            RuntimeError, match="logits of sequence 0 at position 12 are not finite"
        ):
            generate(model, **inputs, **given, drafter=drafter, guard=False)
