"""What the plug-in takes from vLLM's V1 runner, with objects in place of the runner."""

from types import SimpleNamespace

import pytest
import torch
from specdec_vllm import Settings, runner_v1, vllm_interface

NAMES = ["a", "b", "c"]


def runner(*, min_p=(0.0, 0.0, 0.0), seeds=None):
    """A runner whose three requests have 2, 0 and 1 drafts in this step; "b" is in its prefill."""
    generators = {i: torch.Generator().manual_seed(seed) for i, seed in (seeds or {}).items()}
    params = {n: SimpleNamespace(min_p=p) for n, p in zip(NAMES, min_p, strict=True)}
    return SimpleNamespace(
        device=torch.device("cpu"),
        input_batch=SimpleNamespace(
            num_reqs=3, req_ids=[*NAMES, "left over"], generators=generators
        ),
        requests={n: SimpleNamespace(sampling_params=p) for n, p in params.items()},
        query_start_loc=SimpleNamespace(gpu=torch.tensor([0, 3, 8, 10, 10])),
        positions=torch.tensor([30, 31, 32, 0, 1, 2, 3, 4, 70, 71]),
        rejection_sampler=SimpleNamespace(
            specdec_rule="token", specdec_generator=torch.Generator().manual_seed(9)
        ),
        sampler=SimpleNamespace(specdec_step=None),
        drafter=SimpleNamespace(),
    )


DRAFTS = SimpleNamespace(
    logits_indices=torch.tensor([0, 1, 2, 7, 8, 9]), cu_num_sampled_tokens=torch.tensor([3, 4, 6])
)


def sample_step(owner, metadata, tokens):
    """Run a step whose sampler emits `tokens`; returns what the samplers could see of it."""
    seen = []

    def original(self, logits, metadata):
        seen.append(self.sampler.specdec_step)
        return SimpleNamespace(sampled_token_ids=torch.tensor(tokens))

    function = runner_v1.LATE[vllm_interface.RUNNER, "GPUModelRunner._sample"]
    function(original, Settings())(owner, torch.zeros(1), metadata)
    assert owner.sampler.specdec_step is None
    return seen[0]


def test_positions_are_those_of_the_tokens_that_are_decided():
    owner = runner(seeds={0: 5, 2: 6}, min_p=(0.0, 0.1, 0.0))
    step = sample_step(owner, DRAFTS, [[4, 4, 4], [4, -1, -1], [4, -1, -1]])
    assert step.positions.tolist() == [31, 5, 71]
    assert step.seeds[[0, 2]].tolist() == [5, 6]
    assert step.min_p.tolist() == pytest.approx([0.0, 0.1, 0.0])
    assert owner.drafter.specdec_noise.positions.tolist() == [34, 6, 72]


def test_a_step_without_drafts_decides_the_token_after_the_last_input():
    step = sample_step(runner(), None, [[4], [4], [4]])
    assert step.positions.tolist() == [33, 5, 72]
    assert step.min_p is None


def test_a_failing_step_leaves_nothing_behind():
    owner = runner()
    function = runner_v1.LATE[vllm_interface.RUNNER, "GPUModelRunner._sample"]
    with pytest.raises(ZeroDivisionError):
        function(lambda *_: 1 / 0, Settings())(owner, torch.zeros(1), None)
    assert owner.sampler.specdec_step is None


def test_without_speculation_the_runner_is_left_alone():
    owner = runner()
    del owner.rejection_sampler
    function = runner_v1.LATE[vllm_interface.RUNNER, "GPUModelRunner._sample"]
    assert function(lambda *_: "vLLM's", Settings())(owner, torch.zeros(1), None) == "vLLM's"


def test_workers_of_one_engine_draw_the_same_seeds(monkeypatch):
    """Whatever other code of their processes drew from torch's default generator."""
    monkeypatch.setattr(vllm_interface, "replace_if_loaded", lambda *_: None)
    init = runner_v1.REPLACEMENTS[vllm_interface.REJECTION, "RejectionSampler.__init__"]

    def seeds(worker, engine_seed):
        config = SimpleNamespace(
            rejection_sample_method="standard",
            target_model_config=SimpleNamespace(seed=engine_seed),
        )
        owner = runner(seeds={1: 5})
        torch.manual_seed(worker)
        init(lambda *_: None, Settings())(owner.rejection_sampler, owner.sampler, config)
        steps = []
        for _ in range(2):
            torch.manual_seed(worker)
            worker += 2
            steps.append(sample_step(owner, DRAFTS, [[4, 4, 4], [4, -1, -1], [4, -1, -1]]).seeds)
        assert not (steps[0] == steps[1])[[0, 2]].any()
        return torch.cat(steps)

    assert seeds(0, engine_seed=3).equal(seeds(1, engine_seed=3))
    assert not seeds(0, engine_seed=3).equal(seeds(0, engine_seed=4))
    assert not seeds(0, engine_seed=None).equal(seeds(1, engine_seed=None))
