"""A drafter with a head follows its target, which is moved, converted or changed between calls."""

import pytest
import torch
from specdec_hf import Eagle3Drafter, generate
from support import hf_models
from support.heads import head_for
from support.hf_models import one_thread  # noqa: F401  # autouse here


def converted(target):
    target.to(torch.bfloat16)


@torch.no_grad()
def changed_in_place(target):
    target.lm_head.weight.copy_(target.lm_head.weight.flip(0))


@torch.no_grad()
def given_other_memory(target):
    target.lm_head.weight.data = target.lm_head.weight.flip(0)


@pytest.mark.parametrize("change", [converted, changed_in_place, given_other_memory])
def test_a_drafter_drafts_for_a_changed_target_as_a_new_one_does(change):
    target = hf_models.build("llama", layers=4)
    head = head_for(target)
    drafter = Eagle3Drafter(head)

    def decode(drafter):
        return generate(
            target, **hf_models.prompts((9,)), drafter=drafter, max_new_tokens=12, guard=False,
            do_sample=False, return_dict_in_generate=True,
        )  # fmt: skip

    before = decode(drafter)
    change(target)
    again, fresh = decode(drafter), decode(Eagle3Drafter(head))
    assert before.stats.drafted > 0
    assert again.sequences.tolist() == fresh.sequences.tolist()
    assert (again.stats.drafted, again.stats.accepted) == (
        fresh.stats.drafted, fresh.stats.accepted,
    )  # fmt: skip


def test_the_copy_is_kept_while_the_target_stays_as_it_is():
    target = hf_models.build("llama", layers=4)
    drafter = Eagle3Drafter(head_for(target))
    assert drafter._head.on(target) is drafter._head.on(target)
