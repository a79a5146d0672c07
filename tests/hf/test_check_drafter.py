"""`check_drafter` passes every drafter of ours, and fails drafters that are wrong on purpose."""

import numpy as np
import pytest
import torch
from specdec_hf import Draft, Drafter, ModelDrafter, TrieTree, check_drafter
from specdec_hf.drafters.own_layers import EarlyExitDrafter
from support import hf_models

from specdec_kernels import SampledDraft, sample
from specdec_kernels.analysis.uniforms import acceptance_uniforms

VOCAB = 23
SMALL = {"samples": 96, "max_new_tokens": 4, "num_assistant_tokens": 3}


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def smaller():
    return hf_models.build("gpt2", seed=5, vocab_size=VOCAB)


def failures(drafter, target, **options):
    check = check_drafter(drafter, target, **{**SMALL, **options})
    assert str(check).count("FAILED") == sum(not finding.passed for finding in check.findings)
    return {finding.name.split(",")[0] for finding in check.findings if not finding.passed}


@pytest.mark.parametrize("drafter", ["prompt_lookup", "ngram:2"])
def test_named_drafters_pass(drafter, target):
    check = check_drafter(drafter, target, **SMALL, rules=("block",))
    assert check.passed, str(check)
    drawn = any(finding.name.startswith("drafts") for finding in check.findings)
    assert drawn == (drafter != "prompt_lookup")
    assert not check.notes


def test_a_model_with_a_tree_passes(target, smaller):
    options = {"tree": TrieTree(depth=3), "num_assistant_tokens": None, "samples": 48}
    assert not failures(smaller, target, **options, rules=("traversal",))


class HotterThanReported(ModelDrafter):
    """Draws at twice the temperature."""

    def start(self, context):
        super().start(context)
        sampling = self._draft.sampler.sampling
        sampling["temperature"] = sampling["temperature"] * 2


class MostLikelyAsDrawn(ModelDrafter):
    """Takes the most likely token and reports the whole distribution."""

    def propose(self, history, limits):
        draft = super().propose(history, limits)
        if draft.distribution is not None:
            draft.tokens = draft.distribution.logits.argmax(dim=-1)
        return draft


class DropsTheUnlikely(ModelDrafter):
    """Ends a draft before a token that was drawn with a small probability."""

    def propose(self, history, limits):
        draft = super().propose(history, limits)
        rows = draft.distribution
        if rows is not None:
            drawn = rows.logits.gather(-1, draft.tokens[..., None])[..., 0].double()
            unlikely = (drawn / rows.temperature - rows.logsumexp).exp() < 0.15
            draft.counts = (unlikely.cumsum(dim=1) == 0).sum(dim=1).numpy()
        return draft


class KnowsTheUniforms(Drafter):
    """Drafts the second token where the uniform would reject it, so that it is never emitted."""

    rules = ("token",)

    def start(self, context):
        self.context = context

    def propose(self, history, limits):
        lengths = torch.from_numpy(history.lengths.copy())
        uniforms = acceptance_uniforms(self.context.seeds, lengths, 1)
        logits = self.context.model(torch.from_numpy(history.tokens[:, : lengths[0]].copy())).logits
        best = logits[:, -1].softmax(dim=-1).topk(2)
        return torch.where(uniforms < best.values[:, :1], best.indices[:, :1], best.indices[:, 1:])


WRONG = (
    HotterThanReported,
    pytest.param(MostLikelyAsDrawn, marks=pytest.mark.full),
    pytest.param(DropsTheUnlikely, marks=pytest.mark.full),
)


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_drafters_fail(wrong, target, smaller):
    assert "drafts" in failures(wrong(smaller), target, rules=("token",))


@pytest.mark.full
def test_a_biased_text_fails(target):
    assert "text" in failures(KnowsTheUniforms(), target, max_new_tokens=3, samples=1024)


def test_penalties_of_the_generation_config_are_left_out():
    model = hf_models.build("llama", vocab_size=VOCAB)
    model.generation_config.repetition_penalty = 1.5
    assert not failures("prompt_lookup", model, rules=("token",))
    assert model.generation_config.repetition_penalty == 1.5


def test_the_forward_of_a_drafter_is_tested_too(target):
    class WrongForward(EarlyExitDrafter):
        def forward(self, tokens, starts, keep):
            logits = super().forward(tokens, starts, keep)
            return logits if logits is None or self.context.rule == "greedy" else logits.flip(-1)

        def start(self, context):
            super().start(context)
            self.context = context

    assert "text" in failures(WrongForward(1), target, rules=("token",))
    assert not failures(EarlyExitDrafter(1), target, rules=("token",))


class Forms(Drafter):
    """Draws at random, with an absent token at times, and returns tokens in one of the forms."""

    draws = True

    def __init__(self, form):
        self.form = form

    def start(self, context):
        self.context = context

    def propose(self, history, limits):
        batch_size, gamma = len(limits), int(limits.max())
        rows = torch.zeros(batch_size, gamma, VOCAB)
        positions = self.context.noise_positions(history.lengths, np.arange(gamma))
        noise = "shared" if self.context.rule == "match" else "draft"
        drawn = sample(
            rows.flatten(0, 1), seeds=self.context.seeds.repeat_interleave(gamma),
            positions=positions.flatten(), noise=noise,
        )  # fmt: skip
        tokens, *statistics = (
            x.view(-1, gamma) for x in (drawn.tokens, drawn.logsumexp, drawn.threshold)
        )
        tokens[::2, 1:] = -1
        return Draft(self.form(tokens), distribution=SampledDraft(rows, *statistics, 1.0))


@pytest.mark.parametrize("form", [torch.Tensor.numpy, torch.Tensor.tolist], ids=["array", "lists"])
def test_all_that_the_loop_takes_is_tested(form, target):
    check = check_drafter(Forms(form), target, **SMALL, rules=("block",))
    assert check.passed, str(check)
    assert any(one.count for one in check.findings if one.name.startswith("drafts"))
