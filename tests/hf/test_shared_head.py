"""The copy of a head that drafts for a target: it follows the target, and goes with it.

All default calls with a target share one.
"""

import gc
import weakref

import pytest
import torch
from specdec_hf import Eagle3Drafter
from specdec_hf.heads.auto import AutoDrafter
from specdec_hf.heads.eagle3.files import save_head
from specdec_hf.heads.shipped import HEAD_FOLDER
from specdec_hf.runner.compiled.compiled_call import CompileStats
from support import hf_models
from support.heads import head_for
from support.recorded_ops import run_layers_as_they_are


@pytest.fixture
def target(tmp_path):
    """A model with a head beside it."""
    model = hf_models.build("llama", vocab_size=11)
    model.config._name_or_path = str(tmp_path)
    save_head(head_for(model, noise=0.1), tmp_path / HEAD_FOLDER, torch.float32)
    return model


def run(target, **settings):
    return hf_models.decode(target, **({"drafter": "auto"} | settings))


def test_reading_the_head_draws_no_random_numbers(target):
    """The first call reads it, and then draws its seeds."""
    seeds = []
    for _ in range(2):
        torch.manual_seed(3)
        seeds.append(run(target, do_sample=True).stats.seeds)
    assert seeds[0] == seeds[1]


def test_the_second_call_compiles_no_head(target, monkeypatch):
    run_layers_as_they_are(monkeypatch)
    monkeypatch.setattr("specdec_hf.loop.begin.use_compiled", lambda *_, **__: CompileStats())
    first, second = (run(target, compile=True).stats.compiled.drafts[0] for _ in range(2))
    assert first.seconds > 0
    assert second.seconds == 0


def test_the_copy_dies_with_its_target(tmp_path):
    model = hf_models.build("llama", vocab_size=11)
    model.config._name_or_path = str(tmp_path)
    save_head(head_for(model), tmp_path / HEAD_FOLDER, torch.float32)
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
    assert again.sequences.tolist() == fresh.sequences.tolist()
    assert (again.stats.drafted, again.stats.accepted) == (
        fresh.stats.drafted, fresh.stats.accepted,
    )  # fmt: skip
