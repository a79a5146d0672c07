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

ONE, RAGGED = (9,), (9, 4, 12)
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 5, "seed": 3}
HOW = pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
CHAINS = "drafter 'auto' drafts chains with suffix_automaton: "
NOTHING = "drafter 'auto' drafts nothing: "
SCHEDULE = "--num-assistant-tokens-schedule"


def run(model, lengths=ONE, inputs=None, **kwargs):
    inputs = inputs or hf_models.prompts(lengths, vocab_size=11)
    how = {"max_new_tokens": 16, "guard": False, "return_dict_in_generate": True, **kwargs}
    return generate(model, **inputs, **how)


def text_of(out):
    return out.sequences.tolist()


def choice_in(notes):
    return [note for note in notes if AUTO in note]


def test_the_default_of_every_entry_is_auto(model):
    for function in (generate, SpeculativeDecoder, Options):
        assert inspect.signature(function).parameters["drafter"].default == AUTO
    assert DEFAULT_DRAFTERS == (AUTO,)
    assert run(model).stats.drafter == AUTO
    inputs = hf_models.prompts(ONE, vocab_size=11)
    kwargs = {"max_new_tokens": 3, "return_dict_in_generate": True}
    hooked = model.generate(**inputs, **kwargs, custom_generate=SpeculativeDecoder())
    _, streamed = run_stream(SpeculativeDecoder().stream(model, **inputs, **kwargs), lambda _: None)
    assert hooked.stats.drafter == streamed.stats.drafter == AUTO


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("lengths", [ONE, RAGGED], ids=["alone", "ragged"])
@HOW
def test_a_default_call_has_the_text_of_plain_decoding(model, lengths, how):
    # Another process that takes the machine's time could let the schedule draft nothing.
    out = run(model, lengths, **how, clock=Clock(0.25))
    assert out.stats.drafter == AUTO
    assert out.stats.accepted > 0
    assert out.stats.notes == []
    assert text_of(out) == text_of(run(model, lengths, **how, drafter=None))


def own(model):
    return model, hf_models.prompts(RAGGED, vocab_size=11)


THREE = GenerationConfig(num_assistant_tokens=3, pad_token_id=0)
EMBEDDED = torch.arange(1, 7)[None]
# A model with its inputs, options that a tree or any draft is refused with, and what drafts then.
LIMITS = {
    "cache of the batch": (own, {"cache": "aligned"}, CHAINS),
    "num_assistant_tokens": (own, {"num_assistant_tokens": 3}, CHAINS),
    "generation_config": (own, {"generation_config": THREE}, CHAINS),
    "schedule": (own, {"num_assistant_tokens_schedule": "heuristic"}, CHAINS),
    "block": (own, {"rule": "block"}, CHAINS),
    "encoder": (
        lambda _: (encoder_models.tiny("t5"), encoder_models.texts(RAGGED)), {}, CHAINS,
    ),
    "ALiBi": (lambda _: own(build("BloomForCausalLM")), {}, CHAINS),
    "state space": (lambda _: own(build("MambaForCausalLM")), {}, NOTHING),
    "beams": (own, {"num_beams": 2}, NOTHING),
    "embeddings": (
        lambda model: (
            model, {"inputs_embeds": model.get_input_embeddings()(EMBEDDED).detach()},
        ),
        {}, NOTHING,
    ),
    "no tokens": (own, {"num_assistant_tokens": 0}, NOTHING),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[pytest.mark.full] if x == "ALiBi" else []) for x in LIMITS]
)
def test_calls_that_refuse_trees_get_chains_or_no_drafts_and_a_note(model, case):
    make, options, note = LIMITS[case]
    target, inputs = make(model)
    options = {**GREEDY, **options, "max_new_tokens": 8, "inputs": inputs}
    out = run(target, **options)
    assert text_of(out) == text_of(run(target, **options, drafter=None))
    if case == "no tokens":
        assert out.stats.drafted == 0
        assert out.stats.notes == [f"{NOTHING}num_assistant_tokens is 0"]
        return
    (found,) = choice_in(out.stats.notes)
    assert found.startswith(note)
    assert out.stats.drafter == ("suffix_automaton" if note == CHAINS else "none")
    drafters = [AutoDrafter()] + [SuffixAutomatonDrafter()] * (note == NOTHING)
    for drafter in drafters if case != "embeddings" else ():  # other models refuse these
        with pytest.raises(ValueError) as refused:
            run(target, **options, drafter=drafter)
        assert note == NOTHING or found == note + str(refused.value)


def test_no_tokens_of_a_named_drafter_have_a_note_too(model):
    out = run(model, **GREEDY, drafter="ngram", num_assistant_tokens=0)
    reason = "num_assistant_tokens is 0"
    assert out.stats.notes == [f"nothing is drafted: {reason}; drafter=None does without a drafter"]
    assert run(model, **GREEDY, drafter=None, num_assistant_tokens=0).stats.notes == []


def test_without_the_native_module_that_copies_need_text_is_decoded_plainly(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "specdec_host", None)
    with pytest.raises(ImportError):
        run(model, drafter="suffix_automaton")
    out = run(model)
    assert out.stats.drafter == "none"
    assert choice_in(out.stats.notes)[0].startswith(NOTHING)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"assistant_confidence_threshold": 0.3}, False),
        (
            {
                "assistant_confidence_threshold": 0.3,
                "num_assistant_tokens_schedule": "confidence",
            },
            True,
        ),
        ({"assistant_confidence_threshold": 7.0}, True),
    ],
    ids=["low", "of a schedule", "high"],
)
def test_a_threshold_is_for_drafters_that_were_named(model, options, refused):
    plain = text_of(run(model, **GREEDY, drafter=None))
    for drafter in (AUTO, None):
        assert text_of(run(model, **GREEDY, **options, drafter=drafter)) == plain
    if refused:
        with pytest.raises(ValueError):
            run(model, **GREEDY, **options, drafter="suffix_automaton")


def test_traced_calls_get_the_trees_of_others(model):
    traced = []
    plain, out = run(model, **GREEDY), run(model, **GREEDY, trace=traced.append)
    assert out.stats.drafter == plain.stats.drafter == AUTO
    assert text_of(out) == text_of(plain)
    assert len(traced) == out.stats.rounds
    assert any(one.parents is not None for one in traced)


def test_sampled_chains_have_the_text_of_plain_decoding_with_rule_match(model):
    """So the guard may pause them, as it may trees."""
    out = run(model, RAGGED, **SAMPLED, cache="aligned")
    plain = run(model, RAGGED, **SAMPLED, cache="aligned", drafter=None, rule="match")
    assert (out.stats.drafter, out.stats.rule) == ("suffix_automaton", "match")
    (note,) = choice_in(out.stats.notes)
    assert note.startswith("drafter 'auto' drafts chains with suffix_automaton and rule 'match': ")
    assert out.stats.accepted > 0
    assert text_of(out) == text_of(plain)


def test_the_tree_is_sized_by_schedule_optimal_and_chains_are_not(model):
    for options, sized in (
        ({}, True),
        ({"num_assistant_tokens_schedule": "constant"}, False),
        ({"cache": "aligned"}, False),
    ):
        rounds = run(model, **GREEDY, **options).stats.round_log[1:]
        assert {"gamma" in one.schedule for one in rounds} == {sized}


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
    assert chains[0] != SCHEDULE or says(result, SCHEDULE.strip("-").replace("-", "_"))


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
    out, forward = run(target, RAGGED, drafter=drafter), MonotoneCost()
    forward.observe(1, 1.0)
    assert drafter.chosen == COPYING
    assert out.stats.drafter == "auto"
    assert out.stats.tree == "that of auto"
    assert predict([out.stats], forward, drafts_on_host=True).alpha is None, "it drafts trees"


@HOW
def test_a_head_beside_the_target_drafts_too(target, tmp_path, how):
    save_head(head_for(target, noise=0.1), tmp_path / HEAD_FOLDER, torch.float32)
    drafter = AutoDrafter()
    out = run(target, RAGGED, drafter=drafter, **how)
    assert drafter.chosen == f"eagle3, {COPYING}"
    assert out.stats.accepted > 0
    # No draft has a part in the text: it is the target's own with the same noise.
    rule = {"rule": out.stats.rule} if how is SAMPLED else {}
    other = run(target, RAGGED, drafter="token_recycling", **how, **rule)
    assert text_of(out) == text_of(other)


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
@HOW
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
    assert text_of(out) == text_of(before)
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
        out = run(
            target, lengths, guard=BenefitGuard(max_loss=0.02), clock=lambda: float(next(ticks)),
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
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(ONE)

    def forbid_all(ids, scores):
        return scores.new_full(scores.shape, -torch.inf) if ids.shape[1] == 12 else scores

    given = {**inputs, **GREEDY, "max_new_tokens": 6, "logits_processor": [forbid_all]}
    assert model.generate(**given)[0, 12] == 0
    for drafter in ("auto", None, "suffix_automaton"):
        with pytest.raises(RuntimeError, match="sequence 0 at position 12 are not finite"):
            generate(model, **given, drafter=drafter, guard=False)
