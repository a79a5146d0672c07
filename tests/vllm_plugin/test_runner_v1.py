"""What the plug-in takes from vLLM's V1 runner, with objects in place of the runner."""

from types import SimpleNamespace

import pytest
import torch
from specdec_vllm import Settings, runner_v1, vllm_interface

from specdec_kernels import draft_positions, sample

V = 17
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


SAMPLE_FROM_LOGITS = runner_v1.LATE[
    vllm_interface.PROPOSER, "SpecDecodeBaseProposer._sample_from_logits"
](lambda *_: "vLLM's", Settings())


def draw(rule, rows, number=1, *, probabilistic=True, temperature=None):
    """(tokens, probabilities) of the last of `number` drafts of the requests `rows`."""
    logits = 2 * torch.randn(40, V, generator=torch.Generator().manual_seed(1))
    rows = torch.as_tensor(rows)
    temperature = torch.linspace(0.5, 1.5, 40) if temperature is None else temperature
    noise = runner_v1.DraftNoise(rule, rows + 3, 10 * rows)
    owner = SimpleNamespace(_enable_probabilistic_draft_probs=probabilistic, specdec_noise=noise)
    given = SimpleNamespace(all_greedy=False, temperature=temperature[rows])
    for _ in range(number):
        drawn = SAMPLE_FROM_LOGITS(owner, logits[rows].clone(), given)
    return drawn, logits[rows] / temperature[rows, None]


@pytest.mark.parametrize(
    ("rule", "noise"), [("token", "draft"), ("block", "draft"), ("match", "shared")]
)
def test_drafts_take_the_noise_that_the_rule_needs(rule, noise):
    rows = torch.arange(40)
    (tokens, probs), logits = draw(rule, rows, number=2)
    positions = draft_positions(10 * rows, 2, rule=rule)[:, 1]
    expected = sample(logits, seeds=rows + 3, positions=positions, noise=noise).tokens
    assert tokens.equal(expected)
    torch.testing.assert_close(probs, logits.softmax(-1))


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_drafts_that_come_at_once_are_those_that_come_one_after_another(rule):
    """Parallel drafting: the rows of each request's drafts follow each other."""
    rows, temperature = torch.arange(20), torch.linspace(0.5, 1.5, 20)
    logits = 2 * torch.randn(20, 3, V, generator=torch.Generator().manual_seed(1))

    def drawn(steps):
        owner = SimpleNamespace(
            _enable_probabilistic_draft_probs=True,
            specdec_noise=runner_v1.DraftNoise(rule, rows + 3, 10 * rows),
        )
        given = SimpleNamespace(all_greedy=False, temperature=temperature)
        parts = [SAMPLE_FROM_LOGITS(owner, step.flatten(0, 1), given) for step in steps]
        tokens = torch.cat([tokens.view(20, -1) for tokens, _ in parts], dim=1)
        return tokens, torch.cat([probs.view(20, -1, V) for _, probs in parts], dim=1)

    one_by_one, probs = drawn(logits.split(1, dim=1))
    at_once, probs_at_once = drawn([logits])
    assert at_once.equal(one_by_one)
    torch.testing.assert_close(probs_at_once, probs)
    assert drawn(logits.split([1, 2], dim=1))[0].equal(one_by_one)


def test_drafts_of_no_whole_number_a_request_remain_those_of_vllm_with_one_warning(logged):
    noise = runner_v1.DraftNoise("token", torch.arange(4), torch.arange(4))
    owner = SimpleNamespace(_enable_probabilistic_draft_probs=True, specdec_noise=noise)
    given = SimpleNamespace(all_greedy=False, temperature=torch.ones(4))
    runner_v1._warn_once.cache_clear()
    for _ in range(2):
        assert SAMPLE_FROM_LOGITS(owner, torch.zeros(6, V), given) == "vLLM's"
    assert logged == [
        "specdec_vllm: drafts come from vLLM's own noise: their number must be a multiple of 4 "
        "requests, got 6"
    ]


def test_drafts_do_not_depend_on_the_batch():
    (together, _), _ = draw("token", range(40))
    (others, _), _ = draw("token", [30, 4, 17])
    assert others.tolist() == together[[30, 4, 17]].tolist()


def test_greedy_requests_of_a_batch_draft_their_argmax():
    temperature = torch.zeros(40)
    temperature[::2] = 1.0
    rows = torch.arange(40)
    (tokens, probs), _ = draw("token", rows, temperature=temperature)
    assert tokens[1::2].equal(probs[1::2].argmax(-1))
    assert not tokens[::2].equal(probs[::2].argmax(-1))


def test_drafts_without_probabilities_remain_those_of_vllm():
    assert draw("token", range(40), probabilistic=False)[0] == "vLLM's"
