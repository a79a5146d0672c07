"""EAGLE-3 heads: what they draft in a call."""

import copy
import gc
import re
import weakref

import pytest
import torch
from specdec_hf import Eagle3ChainDrafter, Eagle3Drafter
from specdec_hf.drafting.registry import class_of
from specdec_hf.heads.auto import AutoDrafter
from specdec_hf.heads.eagle3.files import save_head
from specdec_hf.heads.pairs import draft as head_draft
from specdec_hf.heads.shipped import HEAD_FOLDER
from specdec_hf.runner.compiled.compiled_call import CompileStats
from specdec_hf.trees import EagleTree
from support import drafter_cases, hf_models
from support.heads import differences, expected_logits, head_folder, head_for, rounds_of
from support.recorded_ops import run_layers_as_they_are
from support.sources import ROOT

from specdec_kernels import tree_attention

PAGE = ROOT / "docs" / "heads.md"
DRAFTERS = [Eagle3Drafter, Eagle3ChainDrafter]


def largest_difference(target, head, kind=Eagle3ChainDrafter, lengths=(9, 4, 12), **settings):
    """How far drafts are from those of one forward over the whole text."""

    def logits_of(text, drafts):
        row = torch.full((target.config.vocab_size,), -torch.inf)
        row[head.tokens] = expected_logits(target, head, text, drafts)
        return row

    if kind is Eagle3Drafter:
        drafter = kind(head, EagleTree(width=2, depth=3, size=6))
    else:
        drafter, settings = kind(head), {"do_sample": True, "rule": "token", **settings}
    _, rounds = rounds_of(target, drafter, lengths, max_new_tokens=8, **settings)
    found = differences(rounds[:: 1 + len(rounds) // 4], logits_of)
    assert {depth for _, depth in found} >= {0, 1, 2}
    return max(difference for difference, _ in found)


@pytest.mark.parametrize(
    ("kind", "lengths", "arguments"),
    [
        (Eagle3ChainDrafter, (9,), {}),
        (Eagle3Drafter, (9, 4, 12), {}),
        (Eagle3ChainDrafter, (9, 4, 12), {"cache": "aligned"}),
        (Eagle3ChainDrafter, (9, 4, 12), {"cache": "dynamic"}),
    ],
    ids=["chain", "tree", "aligned", "dynamic"],
)
def test_drafting_equals_one_forward_over_the_whole_text(kind, lengths, arguments):
    """Also below nodes of a tree, each of which sees its own ancestors only."""
    target = hf_models.tiny("llama")
    head = head_for(target, range(3, 40), noise=0.1)
    assert largest_difference(target, head, kind, lengths, **arguments) < 1e-4


def test_a_mask_without_the_tree_is_found(monkeypatch):
    """Negative control of the test above."""

    def causal(parents, lengths, **kwargs):
        chain = torch.arange(-1, parents.shape[1] - 1).expand_as(parents)
        return tree_attention(parents, lengths, **kwargs)._replace(
            mask=tree_attention(chain, lengths, **kwargs).mask
        )

    monkeypatch.setattr(head_draft, "tree_attention", causal)
    target = hf_models.tiny("llama")
    head = head_for(target, range(3, 40), noise=0.1)
    assert largest_difference(target, head, Eagle3Drafter) > 1e-2


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "peagle"])
def test_a_cache_that_was_given_leaves_the_text_as_it_is(kind, tmp_path):
    """A head drafts once it has states, and knows those of later tokens only."""
    target = hf_models.build("llama", vocab_size=7)
    ids = hf_models.prompts((9,), vocab_size=7)["input_ids"]
    drafter = drafter_cases.NAMED[kind](target, tmp_path)
    for cached in (6, 8):
        past = target(ids[:, :cached], use_cache=True).past_key_values
        given = {"past_key_values": past, "drafter": drafter, "max_new_tokens": 16}
        assert hf_models.decode_as_generate(target, **given).stats.drafted > 0


def test_hidden_states_are_returned_as_without_a_head():
    """The head reads some of the layers that the caller gets."""
    target = hf_models.build("llama", vocab_size=7)
    plain, out = (
        hf_models.decode(target, (9, 4), max_new_tokens=6, output_hidden_states=True, drafter=one)
        for one in (None, Eagle3Drafter(head_for(target)))
    )
    assert len(out.hidden_states) == len(plain.hidden_states) == 6
    torch.testing.assert_close(out.hidden_states, plain.hidden_states, atol=1e-5, rtol=1e-4)


def test_a_head_drafts_in_the_dtype_of_its_target_and_stays_as_it_is():
    target = hf_models.build("llama", vocab_size=7).to(torch.bfloat16)
    head = head_for(hf_models.build("llama", vocab_size=7))
    before = {name: x.clone() for name, x in head.state_dict().items()}
    for kind in DRAFTERS:
        out = hf_models.decode(target, (9, 4), drafter=kind(head), max_new_tokens=8)
        assert out.stats.drafted > 0
    assert all(torch.equal(x, before[name]) for name, x in head.state_dict().items())


def test_in_16_bits_the_angles_of_a_head_are_those_of_its_training():
    target = hf_models.build("llama")
    head = head_for(target)
    placed = Eagle3Drafter(head)._head.on(target.bfloat16())
    places = torch.tensor([[1, 100, 3000]])
    for mine, exact in zip(placed.turns(places), head.turns(places), strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.equal(mine, exact.bfloat16())


@pytest.mark.parametrize(
    "kind", ["eagle3", "eagle3_chain", "medusa", "blockwise", "exit_head", "pass_head"]
)
def test_other_heads_and_targets_are_refused(kind, tmp_path):
    with pytest.raises(TypeError, match=r"head must be .* or the folder of such a head, got int"):
        class_of(kind)(3)
    made = drafter_cases.NAMED[kind](hf_models.tiny("llama"), tmp_path)
    with pytest.raises(ValueError, match="trained for a model with a vocabulary of 67, got 9"):
        hf_models.decode(hf_models.build("llama", vocab_size=9), drafter=made)


@pytest.mark.parametrize("kind", ["longrope", pytest.param("dynamic", marks=pytest.mark.full)])
def test_angles_that_depend_on_the_longest_text_are_those_of_the_text(kind, monkeypatch):
    """A table for places beyond the text would turn all of them by other angles."""
    target = hf_models.build("llama", layers=4)
    half = target.config.hidden_size // target.config.num_attention_heads // 2
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {
            "short_factor": [1.0] * half, "long_factor": [8.0] * half,
            "original_max_position_embeddings": 64,
        }  # fmt: skip
    shaped = copy.deepcopy(target)
    shaped.config.rope_parameters = rope
    shaped.config.max_position_embeddings = 64
    head = head_for(shaped, noise=0.05).requires_grad_(False)
    assert largest_difference(target, head) < 1e-4
    # Negative control: a table of more places than the text has.
    monkeypatch.setattr("specdec_hf.heads.pairs.draft.ROPES_BY_LENGTH", ())
    assert largest_difference(target, head) > 1e-3


@pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not here")
def test_the_code_of_the_page_runs(tmp_path, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    model, inputs = hf_models.build("llama", vocab_size=7), hf_models.prompts((9, 12), vocab_size=7)
    names = {"model": model, "inputs": inputs, "folder": head_folder(model, tmp_path)}
    for block in blocks:
        exec(block, names)
    want = model.generate(**inputs, max_new_tokens=16, do_sample=False).tolist()
    assert names["text"].tolist() == names["out"].sequences.tolist() == want
    assert float(capsys.readouterr().out) > 1


# The copy of a head that drafts for a target, which all default calls share.


def with_a_head(folder):
    """A model with a head beside it."""
    model = hf_models.build("llama", vocab_size=11)
    model.config._name_or_path = str(folder)
    save_head(head_for(model, noise=0.1), folder / HEAD_FOLDER, torch.float32)
    return model


def run(target, **settings):
    return hf_models.decode(target, drafter="auto", **settings)


def test_reading_the_head_draws_no_random_numbers(tmp_path):
    """The first call reads it, and then draws its seeds."""
    target, seeds = with_a_head(tmp_path), []
    for _ in range(2):
        torch.manual_seed(3)
        seeds.append(run(target, do_sample=True).stats.seeds)
    assert seeds[0] == seeds[1]


def test_the_second_call_compiles_no_head(tmp_path, monkeypatch):
    target = with_a_head(tmp_path)
    run_layers_as_they_are(monkeypatch)
    monkeypatch.setattr("specdec_hf.loop.begin.use_compiled", lambda *_, **__: CompileStats())
    first, second = (run(target, compile=True).stats.compiled.drafts[0] for _ in range(2))
    assert first.seconds > 0
    assert second.seconds == 0


def test_the_copy_dies_with_its_target(tmp_path):
    model = with_a_head(tmp_path)
    run(model)
    copied = weakref.ref(AutoDrafter()._find(model)[0].on(model))
    assert copied() is not None
    del model
    gc.collect()
    assert copied() is None


@pytest.mark.parametrize(
    "change",
    [
        lambda target: target.to(torch.bfloat16),
        lambda target: target.lm_head.weight.copy_(target.lm_head.weight.flip(0)),
        lambda target: setattr(target.lm_head.weight, "data", target.lm_head.weight.flip(0)),
    ],
    ids=["converted", "changed in place", "given other memory"],
)
def test_a_drafter_drafts_for_a_changed_target_as_a_new_one_does(change):
    target = hf_models.build("llama", layers=3)
    head = head_for(target)
    drafter = Eagle3Drafter(head)
    before = hf_models.decode(target, drafter=drafter)
    with torch.no_grad():
        change(target)
    again, fresh = (hf_models.decode(target, drafter=one) for one in (drafter, Eagle3Drafter(head)))
    assert before.stats.drafted > 0
    assert hf_models.outcome(again) == hf_models.outcome(fresh)
