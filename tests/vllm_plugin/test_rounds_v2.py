"""Texts of several rounds by vLLM's V2 classes, against the probabilities of all texts.

vLLM draws the drafts. Where its noise follows from their position alone, the next round meets the
noise of rejected drafts again, by which rule block has decided: the bias that the plug-in refuses.
"""

import pytest
import torch
from proofs import SIGNIFICANCE, chi_square, filtered_distribution, joint_distribution
from vllm_plugin import vllm_engine

from specdec_kernels.versions import release

pytest.importorskip("vllm", reason="`make more TASK=test-vllm` installs vLLM")
pytest.importorskip("triton", reason="the V2 runner is made of Triton kernels")
pytestmark = pytest.mark.timeout(580)

VOCAB, LENGTH, COPIES = 3, 4, 8000
PARAMS = {"temperature": 0.9, "top_p": 0.95, "min_p": 0.05}
TARGET, DRAFT = torch.randn(2, VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
RULES, NOISE = ("token", "match", "block"), ("position", "round")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the program says, with the texts by rule and noise."""
    cases = [(r, n) for n in NOISE for r in RULES]
    job = {"target": TARGET.tolist(), "params": PARAMS, "gamma": 3, "length": LENGTH}
    # One row for all tokens: drafts with the same noise are then the same, whatever came before.
    job |= {"draft": 0.5 * DRAFT[:1].expand(VOCAB, -1), "cases": [(COPIES, *c) for c in cases]}
    job["draft"] = job["draft"].tolist()
    found = vllm_engine.run(job, tmp_path_factory.mktemp("rounds"))
    return found | {"texts": dict(zip(cases, found["texts"], strict=True))}


def p_value(texts):
    """Of all texts, whose digits are their tokens; vLLM applies min-p before top-p."""
    logits = TARGET / PARAMS["temperature"]
    probs = logits.softmax(-1)
    logits = logits.masked_fill(probs < PARAMS["min_p"] * probs.amax(-1, True), -torch.inf)
    table = torch.stack([filtered_distribution(row, top_p=PARAMS["top_p"]) for row in logits])
    after = [table[0], table, *(table.expand(*[VOCAB] * n, -1, -1) for n in range(1, LENGTH - 1))]
    digits = VOCAB ** torch.arange(LENGTH - 1, -1, -1)
    return chi_square((torch.tensor(texts) * digits).sum(1), joint_distribution(after).flatten())


@pytest.mark.parametrize(("rule", "noise"), [(r, n) for n in NOISE for r in RULES])
def test_texts_follow_the_target_unless_block_meets_noise_of_rejected_drafts(found, rule, noise):
    p = p_value(found["texts"][rule, noise])
    assert p < 1e-20 if (rule, noise) == ("block", "position") else p > SIGNIFICANCE


def test_block_is_refused_exactly_where_vllm_draws_with_noise_of_positions(found):
    """By its own kernel; 0.33 mixes the index of a draft into the seed."""
    vllm = pytest.importorskip("vllm")
    before = release(vllm.__version__) < release("0.33")
    assert found["own"] == (["position"] if before else ["round"])
    assert bool(found["refused"]) is before
    assert not before or "got draft_sample_method='probabilistic' of a v" in found["refused"]


def test_the_plugin_and_kernels_of_vllm_apply_the_same_parameters(found):
    fused, processed = found["both_ways"]
    assert fused == processed
    assert len(set(map(tuple, fused))) > 9
