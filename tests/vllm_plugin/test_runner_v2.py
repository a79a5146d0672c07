"""The replacements for vLLM's V2 runner, on tensors of the CPU and without vLLM."""

from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from proofs import chi_square
from specdec_vllm import Settings, runner_v2, vllm_interface

V, STATES, STEPS = 23, 6, 3
LENGTHS = [2, 0, 3, 1]  # of the drafts of four requests
INDEX = torch.tensor([4, 0, 5, 2])  # where their parameters are
TEMPERATURE = torch.tensor([1.0, 9.0, 0.0, 9.0, 0.7, 1.6])
TOP_K = torch.tensor([V, 1, V, 1, 6, V], dtype=torch.int32)
TOP_P = torch.tensor([0.8, 0.1, 1.0, 0.1, 0.95, 0.9])
MIN_P = torch.tensor([0.0, 0.9, 0.0, 0.9, 0.05, 0.1])
SEEDS = torch.arange(STATES) * 1000
REJECTION_SAMPLE = runner_v2.REPLACEMENTS[runner_v2.REJECTION_V2, "rejection_sample"]


class Batch:
    """The tensors that the runner passes, for the requests `order` of those above."""

    def __init__(self, order=range(4), seed=0):
        generator = torch.Generator().manual_seed(seed)
        rows = [2 * torch.randn(n + 1, V, generator=generator) for n in LENGTHS]
        ids = [torch.randint(V, (n + 1,), generator=generator) for n in LENGTHS]
        self.draft_logits = torch.randn(STATES, STEPS, V, generator=generator)
        order = list(order)
        lengths = torch.tensor([LENGTHS[i] for i in order])
        self.index = INDEX[order]
        self.logits = torch.cat([rows[i] for i in order])
        self.sampled = torch.cat([ids[i] for i in order]).int()
        self.indptr = torch.nn.functional.pad((lengths + 1).cumsum(0), (1, 0)).int()
        self.expanded = self.index.repeat_interleave(lengths + 1)
        self.local = torch.cat([torch.arange(LENGTHS[i] + 1) for i in order])
        self.pos = 50 * self.expanded + self.local

    def processed(self):
        """What vLLM's kernels make of the logits: temperature, min-p, top-k, top-p."""
        t, k, p, m = (x[self.expanded, None] for x in (TEMPERATURE, TOP_K, TOP_P, MIN_P))
        logits = self.logits / torch.where(t == 0, 1.0, t)
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < m * probs.amax(-1, keepdim=True), -torch.inf)
        ordered = logits.sort(descending=True).values
        logits = logits.masked_fill(logits < ordered.gather(1, k.long() - 1), -torch.inf)
        probs, order = logits.softmax(-1).sort(descending=True)
        drop = torch.zeros_like(probs, dtype=torch.bool)
        drop = drop.scatter(1, order, probs.cumsum(-1) - probs >= p)
        return logits.masked_fill(drop, -torch.inf)

    def rejection_sample(self, draft_logits, settings, **given):
        return REJECTION_SAMPLE(None, settings)(
            self.processed(), draft_logits, self.sampled, self.indptr, self.pos, self.index,
            self.expanded, self.local, TEMPERATURE, SEEDS, STEPS, **given,
        )  # fmt: skip

    def verify(self, draft_logits, settings):
        """The fused path, from unprocessed logits."""
        arrays = dict(temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P, min_p=MIN_P, seeds=SEEDS)
        states = {name: SimpleNamespace(gpu=t, np=t.numpy()) for name, t in arrays.items()}
        sampler = SimpleNamespace(
            return_sampling_mask=False, needs_logits_processing=np.zeros(STATES, dtype=bool),
            logprobs_mode="raw_logprobs", sampling_states=SimpleNamespace(**states),
        )  # fmt: skip
        owner = SimpleNamespace(
            sampler=sampler, specdec_rule=settings.rule, num_speculative_steps=STEPS
        )
        function = runner_v2.REPLACEMENTS[runner_v2.REJECTION_V2, "RejectionSampler._verify"]
        _, sampled, number = function(None, settings)(
            owner, self.logits, draft_logits, self.sampled, self.pos, self.indptr, self.index,
            self.index.numpy(), self.expanded, self.local, None, self.sampled,
        )  # fmt: skip
        return sampled, number


@pytest.mark.parametrize("with_draft", [True, False])
@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_fused_and_processed_logits_give_the_same_tokens(rule, with_draft):
    for seed in range(30):
        batch = Batch(seed=seed)
        draft = batch.draft_logits if with_draft else None
        fused = batch.verify(draft, Settings(rule=rule))
        processed = batch.rejection_sample(draft, Settings(rule=rule))
        assert fused[0].equal(processed[0])
        assert fused[1].equal(processed[1])
        assert fused[0].dtype == torch.int64
        assert fused[1].equal((fused[0] >= 0).sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_request_does_not_depend_on_its_place(rule):
    settings = Settings(rule=rule)
    for order, seed in product(([3, 1, 0, 2], [2], [1, 3, 0], [1, 3, 2]), range(8)):
        batch, whole = Batch(order, seed), Batch(seed=seed)
        tokens, number = whole.verify(whole.draft_logits, settings)
        again, count = batch.verify(batch.draft_logits, settings)
        assert again.equal(tokens[order])
        assert count.equal(number[order])


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 0), (torch.bfloat16, 2)])
def test_a_step_filters_and_copies_no_more_than_its_requests_need(dtype, copies, handed):
    """No request of these has top-k or min-p, but others of the states have. Drafts narrower than
    their target are gathered and widened, those of the batch alone."""
    batch = Batch([3, 1])
    draft_logits = batch.draft_logits.to(dtype)
    with handed:
        batch.verify(draft_logits, Settings(rule="token"))
    assert handed.rows == copies * 2 * STEPS
    assert [type(handed.given[name]) for name in ("top_k", "min_p")] == [int, float]


def test_first_tokens_follow_the_target_for_drafts_at_the_temperature_of_the_request():
    """Drafts drawn at temperature 1 in place of it are the negative control."""
    copies = 6000
    batch = Batch([2], seed=3)
    own, generator = TEMPERATURE[INDEX[2]], torch.Generator().manual_seed(9)
    target = batch.processed()[0].double().softmax(-1)

    def p_value(drawn_at):
        q = (batch.draft_logits[INDEX[2], 0] / drawn_at).softmax(-1)
        drafts = torch.multinomial(q, copies, replacement=True, generator=generator)
        sampled = torch.stack([torch.zeros_like(drafts), drafts], dim=1).flatten()
        rows = batch.processed()[:2].repeat(copies, 1)
        index = torch.arange(copies)
        tokens, _ = REJECTION_SAMPLE(None, Settings())(
            rows, batch.draft_logits[INDEX[2], None].expand(copies, -1, -1), sampled,
            2 * torch.arange(copies + 1, dtype=torch.int32), index.repeat_interleave(2), index,
            None, None, own.expand(copies), index + 77, STEPS,
        )  # fmt: skip
        return chi_square(tokens[:, 0], target)

    assert p_value(own) > 1e-4
    assert p_value(0.5) < 1e-6


def test_steps_without_drafts_use_the_noise_of_the_others():
    """Sampling of the plain path: the same token as a verified row without drafts."""
    pytest.importorskip("vllm", reason="`make more TASK=test-vllm` installs vLLM")
    batch = Batch([1])  # has no drafts
    tokens, _ = batch.rejection_sample(None, Settings())
    function = runner_v2.REPLACEMENTS[runner_v2.SAMPLER_V2, "Sampler._sample_random"]
    states = SimpleNamespace(
        temperature=SimpleNamespace(gpu=TEMPERATURE), seeds=SimpleNamespace(gpu=SEEDS)
    )
    owner = SimpleNamespace(specdec_rule="token", sampling_states=states)
    sampled, _ = function(None, Settings())(
        owner, batch.processed(), batch.expanded, None, batch.pos, None, None, False
    )
    assert sampled.tolist() == tokens[:, 0].tolist()


def test_acceptance_rates_and_watermarks():
    batch = Batch()
    ones = torch.ones(STEPS)
    tokens, number = batch.rejection_sample(
        None, Settings(rule="match"), synthetic_conditional_rates=ones
    )
    assert number.tolist() == [n + 1 for n in LENGTHS]
    assert tokens[2, :3].tolist() == batch.sampled[batch.indptr[2] + 1 : batch.indptr[3]].tolist()
    watermarked = REJECTION_SAMPLE(lambda *given: given[-4], Settings())
    empty = [None] * 11
    assert watermarked(*empty, None, False, False, "contexts") == "contexts"


@pytest.mark.parametrize("own_noise", [False, True])
def test_block_refuses_drafts_that_share_their_noise_with_another_round(monkeypatch, own_noise):
    monkeypatch.setattr(vllm_interface, "drafts_have_own_noise", lambda: own_noise)

    def start(rule, drafts, **others):
        settings, rates = Settings(rule=rule), others.pop("rates", None)
        config = SimpleNamespace(rejection_sample_method="block", draft_sample_method=drafts)
        owner = SimpleNamespace(synthetic_conditional_rates=rates)
        place = runner_v2.REJECTION_V2, "RejectionSampler.__init__"
        init = runner_v2.REPLACEMENTS[place](lambda *_, **__: None, settings)
        init(owner, SimpleNamespace(), config, None, **others)

    for served in (
        dict(rule="token", drafts="probabilistic"), dict(rule=None, drafts="greedy"),
        dict(rule=None, drafts="probabilistic", rates=torch.ones(STEPS)),
        dict(rule=None, drafts="probabilistic", watermark_key=7),
    ):  # fmt: skip
        start(**served)
    with nullcontext() if own_noise else pytest.raises(ValueError, match=r"^rule block .* token"):
        start(None, "probabilistic")
