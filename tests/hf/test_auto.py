"""Drafter "auto": what it merges, and that its text is the target's."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from specdec_hf import generate
from specdec_hf.heads import auto, shipped
from specdec_hf.heads.auto import AutoDrafter
from specdec_hf.heads.eagle3.files import save_head
from specdec_hf.heads.shipped import HEAD_FOLDER
from specdec_hf.lab.bench.configs import drafts_on_host
from specdec_hf.lab.bench.efficiency import predict
from specdec_hf.schedules.benefit_guard import BenefitGuard
from specdec_hf.schedules.costs import MonotoneCost
from support import hf_models
from support.heads import head_for
from support.hf_models import one_thread  # noqa: F401  # autouse here
from transformers import StoppingCriteria, StoppingCriteriaList

SAMPLED = {"do_sample": True, "seed": [1, 2, 3]}
COPYING = "prompt_lookup, suffix_automaton"


@pytest.fixture
def target(tmp_path):
    """A model that was loaded from a folder."""
    model = hf_models.build("llama", vocab_size=11)
    model.config._name_or_path = str(tmp_path)
    return model


def forward():
    cost = MonotoneCost()
    cost.observe(1, 1.0)
    return cost


def run(target, drafter, lengths=(9, 4, 12), **kwargs):
    inputs = hf_models.prompts(lengths, vocab_size=11)
    how = dict(max_new_tokens=10, guard=False, return_dict_in_generate=True) | kwargs
    return generate(target, **inputs, drafter=drafter, **how)


def test_it_copies_where_there_is_no_head(target):
    drafter = AutoDrafter()
    out = run(target, drafter)
    assert drafter.chosen == COPYING
    assert out.stats.drafter == "auto"
    assert out.stats.tree == "that of auto"
    assert predict([out.stats], forward(), drafts_on_host=True).alpha is None, "it drafts trees"
    assert out.sequences.tolist() == run(target, None).sequences.tolist()


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_head_beside_the_target_drafts_too(target, tmp_path, do_sample):
    save_head(head_for(target, noise=0.1), tmp_path / HEAD_FOLDER, torch.float32)
    drafter = AutoDrafter()
    how = dict(do_sample=do_sample, seed=[1, 2, 3]) if do_sample else {}
    out = run(target, drafter, **how)
    assert drafter.chosen == f"eagle3, {COPYING}"
    assert out.stats.accepted > 0
    # No draft has a part in the text: it is the target's own with the same noise.
    rule = dict(rule=out.stats.rule) if do_sample else {}
    other = run(target, "token_recycling", **how, **rule)
    assert out.sequences.tolist() == other.sequences.tolist()


def test_a_head_that_was_replaced_is_read_again(target, tmp_path):
    drafter = AutoDrafter()
    drafts = []
    for noise in (0.0, 3.0):
        folder = tmp_path / HEAD_FOLDER
        if folder.exists():
            folder.rename(tmp_path / "old")
        save_head(head_for(target, noise=noise), folder, torch.float32)
        drafts.append(run(target, drafter).stats.accepted)
    assert drafts[0] != drafts[1]


def of_another_model(folder, monkeypatch):
    save_head(head_for(hf_models.build("llama", vocab_size=13)), folder)


def without_files(folder, monkeypatch):
    folder.mkdir()


def that_may_not_be_read(folder, monkeypatch):
    folder.mkdir()

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (of_another_model, "a vocabulary of 13, got 11"),
        (without_files, r"config\.json"),
        (that_may_not_be_read, "cannot read the head of the target: .*Permission denied"),
    ],
)
def test_a_wrong_head_is_refused_by_name_and_a_default_call_goes_on_without(
    target, tmp_path, monkeypatch, fault, message, how
):
    before = run(target, "auto", **how)
    fault(tmp_path / HEAD_FOLDER, monkeypatch)
    with pytest.raises(ValueError, match=message) as refused:
        run(target, AutoDrafter(), **how)
    out = run(target, "auto", **how)
    assert (out.stats.drafter, out.stats.rule) == ("auto", before.stats.rule)
    # Another note may say that the guard, which goes by the clock, let nothing be drafted.
    assert f"drafter 'auto' drafts without the model's head: {refused.value}" in out.stats.notes
    assert out.sequences.tolist() == before.sequences.tolist()
    assert drafts_on_host("auto", AutoDrafter(), target)


def test_no_head_drafts_on_an_accelerator(target, tmp_path, monkeypatch):
    """Its trees would be on the device, and cannot be merged with copied text."""
    save_head(head_for(target), tmp_path / HEAD_FOLDER, torch.float32)
    assert AutoDrafter().has_head(target)
    for device in ("cuda:0", "mps"):
        monkeypatch.setattr(type(target), "device", torch.device(device))
        assert not AutoDrafter().has_head(target)


def test_calls_without_a_name_read_the_head_once(target, tmp_path, monkeypatch):
    save_head(head_for(target), tmp_path / HEAD_FOLDER, torch.float32)
    run(target, "auto")
    monkeypatch.setattr(auto, "load_head", None)
    assert run(target, "auto").stats.accepted > 0


class Soon(StoppingCriteria):
    """Ends a text long before its budget, which the benefit guard goes by."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] > 40)


def test_the_first_call_with_a_shipped_head_drafts_at_once(target, tmp_path, monkeypatch):
    """Drafts of other heads wait until the text has earned what they may lose."""
    save_head(head_for(target, noise=0.1), tmp_path / HEAD_FOLDER, torch.float32)
    ticks = itertools.count()  # each look at the clock takes as long, so that all rounds do

    def begins(lengths=(12,)):
        guard = BenefitGuard(max_loss=0.02)
        out = run(
            target, "auto", lengths, guard=guard, clock=lambda: float(next(ticks)),
            max_new_tokens=400, stopping_criteria=StoppingCriteriaList([Soon()]),
        )  # fmt: skip
        drafting = (n for n, record in enumerate(out.stats.round_log) if any(record.drafted))
        return next(drafting, math.inf)

    assert begins() > 2
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path)
    assert begins() == 2  # after one round to compare with
    assert begins((9, 4, 12)) > 2, "nothing is expected of it in a batch"
