"""`check_drafter` passes every drafter of ours, and fails drafters that are wrong on purpose."""

import pytest
import torch
from specdec_hf import (
    ModelDrafter,
    StatelessDrafter,
    TrieTree,
    check_drafter,
    drafter_check,
    generate,
)
from support import hf_models

from specdec_kernels.analysis.uniforms import acceptance_uniforms

VOCAB = 23
SMALL = {"samples": 96, "max_new_tokens": 4, "num_assistant_tokens": 3}


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def smaller():
    """Of another architecture and dtype."""
    return hf_models.build("gpt2", seed=5, vocab_size=VOCAB).to(torch.bfloat16)


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


def test_every_text_has_a_seed_of_its_own(target, monkeypatch):
    seeds = []

    def recording(*arguments, **options):
        seeds.extend(options.get("seed") or ())
        return generate(*arguments, **options)

    monkeypatch.setattr(drafter_check, "generate", recording)
    monkeypatch.setattr(drafter_check, "SEQUENCES_AT_ONCE", 20)
    check_drafter("prompt_lookup", target, **SMALL, rules=("token",))
    assert len(seeds) > len(set(seeds)) == SMALL["samples"]  # at two temperatures


def test_a_model_with_a_tree_passes(target, smaller):
    options = {"tree": TrieTree(depth=3), "num_assistant_tokens": None, "samples": 48}
    assert not failures(smaller, target, **options, rules=("traversal",))


class HotterThanReported(ModelDrafter):
    def begin(self, call):
        state, draw = super().begin(call), call.draw
        hot = call.sampling.temperature * 2

        def drawing(*told, sampling):
            return draw(*told, sampling={**sampling, "temperature": hot})

        object.__setattr__(call, "draw", drawing)
        return state


class KnowsTheUniforms(StatelessDrafter):
    """Drafts the second token where the uniform would reject it, so that it is never emitted."""

    rules = ("token",)

    def begin(self, call):
        self.call = call
        return self

    def propose(self, texts, limits):
        lengths = torch.from_numpy(texts.lengths.copy())
        uniforms = acceptance_uniforms(self.call.seeds, lengths, 1)
        logits = self.call.model(torch.from_numpy(texts.tokens[:, : lengths[0]].copy())).logits
        best = logits[:, -1].softmax(dim=-1).topk(2)
        return torch.where(uniforms < best.values[:, :1], best.indices[:, :1], best.indices[:, 1:])


def test_a_drafter_with_another_distribution_than_it_says_fails(target, smaller):
    assert "drafts" in failures(HotterThanReported(smaller), target, rules=("token",))


@pytest.mark.full
def test_a_biased_text_fails(target):
    assert "text" in failures(KnowsTheUniforms(), target, max_new_tokens=3, samples=1024)
