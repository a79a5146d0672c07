"""The replacements are called with the arguments of every supported vLLM, whose place objects take.

The lossy method fly, which 0.33 has, stays with vLLM.
"""

import inspect
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from specdec_vllm import Settings, messages, runner_v1, runner_v2, vllm_interface
from specdec_vllm.vllm_interface import (
    REJECTION,
    REJECTION_V2,
    RUNNER,
    SAMPLER,
    SUPPORTED,
    replaced_in,
)

MAKE = (
    runner_v1.REPLACEMENTS | runner_v1.LATE | runner_v1.WITH_DRAFTS | runner_v2.REPLACEMENTS
)  # fmt: skip
FLY = {"fly_window_size": 2, "fly_entropy_threshold": 0.5, "fly_entropy_top_k": 4}
METHOD_FLY = SimpleNamespace(rejection_sample_method="fly")
V, GAMMA = 19, 3


def replacement(place, original=None, **settings):
    return MAKE[place](original, Settings(**settings))


@pytest.mark.parametrize("version", SUPPORTED)
def test_every_replacement_takes_the_arguments_of_a_version(version):
    replaced = replaced_in(version)
    assert replaced.keys() <= MAKE.keys()
    for place, takes in replaced.items():
        names, signature = takes.split(), inspect.signature(replacement(place))
        if any(one.kind == one.VAR_POSITIONAL for one in signature.parameters.values()):
            signature.bind(*names)
        else:
            signature.bind(**dict.fromkeys(names))


def test_everything_that_is_replaced_is_compared_first():
    assert MAKE.keys() == replaced_in(SUPPORTED[-1]).keys()


OF_V2 = (
    "expanded_local_pos synthetic_conditional_rates contexts watermarking watermarking_skip_mask "
    "watermark_key"
)


def v1_batch():
    """What V1's `rejection_sample` takes in 0.32, by name."""
    number = [2, 3, 0, 1]
    sampling = SimpleNamespace(
        temperature=torch.full((4,), 0.7), top_k=None, top_p=None, all_greedy=False,
        generators={i: torch.Generator().manual_seed(i) for i in range(4)},
    )  # fmt: skip
    return dict(
        draft_token_ids=torch.arange(6) % V, num_draft_tokens=number, max_spec_len=GAMMA,
        cu_num_draft_tokens=torch.tensor(number).cumsum(0), draft_probs=None,
        target_logits=torch.linspace(-2, 3, 6 * V).view(6, V).sin(),
        bonus_token_ids=torch.arange(4)[:, None], sampling_metadata=sampling, synthetic_mode=False,
        synthetic_conditional_rates=None, use_fp64_gumbel=False,
    )  # fmt: skip


def v2_batch():
    """The same of V2's."""
    indptr = torch.tensor([0, 3, 7, 8, 10])
    given = dict(
        target_logits=torch.linspace(-2, 3, 10 * V).view(10, V).sin(), draft_logits=None,
        draft_sampled=torch.arange(10) % V, cu_num_logits=indptr, pos=torch.arange(10),
        idx_mapping=torch.arange(4),
        expanded_idx_mapping=torch.arange(4).repeat_interleave(torch.diff(indptr)),
        temperature=torch.ones(4), seed=torch.arange(4), num_speculative_steps=GAMMA,
        use_fp64=False, use_block_verification=False,
    ) | dict.fromkeys(OF_V2.split())  # fmt: skip
    names = replaced_in("0.32")[REJECTION_V2, "rejection_sample"].split()
    return {name: given.pop(name) for name in names} | given


FUNCTIONS = [(REJECTION, v1_batch, None), (REJECTION_V2, v2_batch, 0)]


def same(first, second):
    if isinstance(first, tuple):
        return all(map(torch.equal, first, second))
    return first.equal(second)


@pytest.mark.parametrize(("module", "batch", "off"), FUNCTIONS, ids=["v1", "v2"])
def test_the_arguments_of_a_later_version_change_no_token(module, batch, off):
    verify = replacement((module, "rejection_sample"))
    tokens = verify(**batch())
    assert same(verify(**batch(), **FLY | {"fly_window_size": off}), tokens)
    assert same(verify(*batch().values(), off, 0.3, 3), tokens)


@pytest.mark.parametrize(("module", "batch", "off"), FUNCTIONS, ids=["v1", "v2"])
def test_fly_gets_to_the_function_of_vllm_with_all_of_its_arguments(module, batch, off):
    place = (module, "rejection_sample")
    names = replaced_in("0.33")[place].split()
    verify = replacement(place, lambda *given: dict(zip(names, given, strict=True)))
    given = batch() | FLY
    assert verify(**given).keys() == given.keys()
    found = verify(**given)
    assert all(found[name] is value for name, value in given.items())


LEFT = "specdec_vllm leaves the drafts to vLLM: rejection_sample_method is fly"


@pytest.mark.parametrize("rule", [None, "match"])
def test_an_engine_with_fly_is_left_to_v1(logged, rule, monkeypatch):
    monkeypatch.setattr(messages, "warned", set())
    rejection = SimpleNamespace(sampler=SimpleNamespace())
    init = replacement((REJECTION, "RejectionSampler.__init__"), lambda *_: None, rule=rule)
    for _ in range(2):
        init(rejection, rejection.sampler, METHOD_FLY)
    assert logged == [LEFT]
    runner = SimpleNamespace(rejection_sampler=rejection, sampler=rejection.sampler)
    for place, owner, given in (
        ((REJECTION, "RejectionSampler.forward"), rejection, (1, 2, 3, 4)),
        ((RUNNER, "GPUModelRunner._sample"), runner, (torch.zeros(1), 5)),
    ):
        assert replacement(place, lambda *got: got)(owner, *given) == (owner, *given)
    assert vars(rejection.sampler) == {}


def test_a_fused_sampler_is_switched_off_where_there_are_drafts(monkeypatch):
    module = types.ModuleType(SAMPLER)
    module.mixed_sample_eligible = lambda sm, predict_bonus_token: True
    for name in (RUNNER, vllm_interface.PROPOSER):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, SAMPLER, module)
    init = replacement((REJECTION, "RejectionSampler.__init__"), lambda *_: None)
    init(SimpleNamespace(), SimpleNamespace(), METHOD_FLY)
    assert module.mixed_sample_eligible(None, False)
    try:
        init(SimpleNamespace(), SimpleNamespace(), None)
        assert not module.mixed_sample_eligible(None, False)
    finally:
        vllm_interface.restore()
    assert module.mixed_sample_eligible(None, False)
    del module.mixed_sample_eligible  # as in 0.32
    init(SimpleNamespace(), SimpleNamespace(), None)
    assert not hasattr(module, "mixed_sample_eligible")
