"""What the plug-in takes from vLLM's V1 runner, with objects in place of the runner."""

from types import SimpleNamespace

import pytest
import torch
from specdec_vllm import Settings, runner_v1, vllm_interface
from specdec_vllm.drafting_v1 import sample_from_logits

from specdec_kernels import verify_chain

NAMES = ["a", "b", "c"]
SAMPLE = runner_v1.LATE[vllm_interface.RUNNER, "GPUModelRunner._sample"]


@pytest.fixture(autouse=True)
def classes_of_vllm(monkeypatch):
    monkeypatch.setattr(vllm_interface, "serves_min_p", lambda _: True)
    monkeypatch.setattr(
        vllm_interface, "is_own_verification", lambda one: not hasattr(one, "other")
    )


def runner(*, min_p=(0.0, 0.0, 0.0), seeds=None):
    """A runner whose three requests have 2, 0 and 1 drafts in this step; "b" is in its prefill."""
    generators = {i: torch.Generator().manual_seed(seed) for i, seed in (seeds or {}).items()}
    params = {n: SimpleNamespace(min_p=p) for n, p in zip(NAMES, min_p, strict=True)}
    own, names = torch.Generator().manual_seed(9), [*NAMES, "left over"]
    return SimpleNamespace(
        device=torch.device("cpu"), drafter=SimpleNamespace(),
        input_batch=SimpleNamespace(num_reqs=3, req_ids=names, generators=generators),
        requests={n: SimpleNamespace(sampling_params=p) for n, p in params.items()},
        query_start_loc=SimpleNamespace(gpu=torch.tensor([0, 3, 8, 10, 10])),
        positions=torch.tensor([30, 31, 32, 0, 1, 2, 3, 4, 70, 71]),
        rejection_sampler=SimpleNamespace(specdec_rule="token", specdec_generator=own),
        sampler=SimpleNamespace(specdec_step=None),
    )  # fmt: skip


DRAFTS = SimpleNamespace(
    logits_indices=torch.tensor([0, 1, 2, 7, 8, 9]), cu_num_sampled_tokens=torch.tensor([3, 4, 6])
)


def sample_step(owner, metadata, tokens):
    """Run a step whose sampler emits `tokens`; returns what the samplers could see of it."""
    seen = []

    def original(self, logits, metadata):
        seen.append(self.sampler.specdec_step)
        return SimpleNamespace(sampled_token_ids=torch.tensor(tokens))

    SAMPLE(original, Settings())(owner, torch.zeros(1), metadata)
    assert owner.sampler.specdec_step is None
    return seen[0]


def test_positions_are_those_of_the_tokens_that_are_decided():
    owner = runner(seeds={0: 5, 2: 2**64 - 3}, min_p=(0.0, 0.1, 0.0))
    step = sample_step(owner, DRAFTS, [[4, 0, 4], [0, -1, -1], [4, -1, -1]])
    assert step.positions.tolist() == [31, 5, 71]
    assert step.seeds[[0, 2]].tolist() == [5, -3], "a seed of the user may have 64 bits"
    assert step.min_p.tolist() == pytest.approx([0.0, 0.1, 0.0])
    assert owner.drafter.specdec_noise.positions.tolist() == [34, 6, 72]


def test_a_step_without_drafts_decides_the_token_after_the_last_input():
    step = sample_step(runner(), None, [[4], [4], [4]])
    assert step.positions.tolist() == [33, 5, 72]
    assert step.min_p is None


def test_min_p_is_refused_for_a_sampler_that_would_ignore_it(monkeypatch):
    monkeypatch.setattr(vllm_interface, "serves_min_p", lambda _: False)
    with pytest.raises(NotImplementedError, match=r"min_p with drafts.*SimpleNamespace"):
        sample_step(runner(min_p=(0.0, 0.1, 0.0)), DRAFTS, [])
    sample_step(runner(), None, [[4], [4], [4]])


def test_unseeded_requests_keep_their_seeds_in_other_batches_until_they_end():
    owner = runner()
    first = sample_step(owner, None, [[4], [4], [4]]).seeds.tolist()
    assert len({*first}) == 3
    batch = owner.input_batch
    batch.req_ids, batch.num_reqs = ["c", "a", "left over"], 2  # "b" is preempted
    assert sample_step(owner, None, [[4], [4]]).seeds.tolist() == [first[2], first[0]]
    owner.requests["a"] = SimpleNamespace(sampling_params=SimpleNamespace(min_p=0.0))
    batch.req_ids, batch.num_reqs = [*NAMES, "left over"], 3
    later = sample_step(owner, None, [[4], [4], [4]]).seeds.tolist()
    assert later[1:] == first[1:]
    assert later[0] not in first, "another request that has the name of one that ended"


def test_rule_match_verifies_with_the_noise_of_the_drafts_of_the_step_before():
    """A draft model that is the target has all of its drafts accepted, without a user's seed."""
    owner = runner()
    owner.rejection_sampler.specdec_rule = "match"
    sample_step(owner, DRAFTS, [[4, 4, 4], [4, -1, -1], [4, 4, -1]])
    owner.drafter._enable_probabilistic_draft_probs = True
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1))
    given = SimpleNamespace(all_greedy=False, temperature=torch.ones(3))
    draw = sample_from_logits(None, Settings())
    drafts = torch.stack([draw(owner.drafter, row, given)[0] for row in logits], dim=1)
    # The inputs of the next step: the last emitted token of each request and its two drafts.
    start = owner.drafter.specdec_noise.positions - 1
    owner.positions = (start[:, None] + torch.arange(3)).flatten()
    following = SimpleNamespace(
        logits_indices=torch.arange(9), cu_num_sampled_tokens=torch.tensor([3, 6, 9])
    )
    step = sample_step(owner, following, [[4, 4, 4]] * 3)
    assert step.positions.equal(owner.drafter.specdec_noise.positions - 3)
    assert step.draft_logits
    assert not sample_step(owner, following, [[4, 4, 4]] * 3).draft_logits, "nothing was drawn"
    assert owner.drafter.specdec_noise.as_logits
    owner.rejection_sampler.other = True
    sample_step(owner, following, [[4, 4, 4]] * 3)
    assert not owner.drafter.specdec_noise.as_logits, "another class reads them"
    target = torch.cat([logits, torch.zeros(1, 3, 50)]).transpose(0, 1)

    def accepted(seeds):
        verdict = verify_chain(
            target, drafts, logits.transpose(0, 1), rule="match", seeds=seeds,
            positions=step.positions,
        )  # fmt: skip
        return verdict.num_accepted.tolist()

    assert accepted(step.seeds) == [2, 2, 2]
    assert accepted(step.seeds + 1) != [2, 2, 2]  # the negative control


def test_a_failing_step_leaves_nothing_behind_and_without_speculation_the_runner_is_left_alone():
    owner = runner()
    with pytest.raises(ZeroDivisionError):
        SAMPLE(lambda *_: 1 / 0, Settings())(owner, torch.zeros(1), None)
    assert owner.sampler.specdec_step is None
    del owner.rejection_sampler
    assert SAMPLE(lambda *_: "vLLM's", Settings())(owner, torch.zeros(1), None) == "vLLM's"


def test_workers_of_one_engine_draw_the_same_seeds(monkeypatch):
    """Whatever other code of their processes drew from torch's default generator."""
    monkeypatch.setattr(vllm_interface, "replace_if_loaded", lambda *_: None)
    init = runner_v1.REPLACEMENTS[vllm_interface.REJECTION, "RejectionSampler.__init__"]

    def seeds(worker, engine_seed):
        model = SimpleNamespace(seed=engine_seed)
        config = SimpleNamespace(rejection_sample_method="standard", target_model_config=model)
        owner = runner(seeds={1: 5})
        torch.manual_seed(worker)
        init(lambda *_: None, Settings())(owner.rejection_sampler, owner.sampler, config)
        return sample_step(owner, DRAFTS, [[4, 4, 4], [4, -1, -1], [4, -1, -1]]).seeds

    assert seeds(0, engine_seed=3).equal(seeds(1, engine_seed=3))
    assert not seeds(0, engine_seed=3).equal(seeds(0, engine_seed=4))
    assert not seeds(0, engine_seed=None).equal(seeds(1, engine_seed=None))
