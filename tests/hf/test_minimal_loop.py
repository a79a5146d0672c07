"""examples/minimal_loop.py: the texts of the target, with drafts of either kind, in a batch."""

import runpy
import types
from pathlib import Path

import pytest
import torch
from support import hf_models

EXAMPLE = Path(__file__).parents[2] / "examples/minimal_loop.py"
PROMPTS = [[5, 6, 7, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 9]]

pytestmark = pytest.mark.skipif(not EXAMPLE.is_file(), reason="the examples are not here")


@pytest.fixture(scope="module")
def example():
    return types.SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


def plain(model, prompts=PROMPTS):
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()
        for prompt in prompts
    ]


@pytest.mark.parametrize("drafted", ["copied", "drafted", "drafted well"])
def test_the_greedy_text_is_that_of_generate(example, model, drafted):
    noise = {"drafted": 0.1, "drafted well": 0.0}.get(drafted)
    draft_model = None if noise is None else hf_models.with_noise(model, noise)
    texts, rounds = example.generate(model, PROMPTS, 24, draft_model=draft_model)
    assert texts == plain(model)
    if drafted == "drafted well":
        assert rounds == [4] * 3  # of six tokens each
    else:
        assert max(rounds) < 24


def test_a_text_ends_at_the_end_of_sequence(example, model):
    (whole,) = plain(model, PROMPTS[:1])
    model = hf_models.build("llama", vocab_size=11)
    model.generation_config.eos_token_id = [whole[9], 10]
    want = plain(model)
    assert len(want[0]) < len(whole)
    assert example.generate(model, PROMPTS, 24)[0] == want


def test_sampled_texts_have_the_targets_distribution(example, model, monkeypatch):
    """Two tokens of 3000 sequences, which are drafted in one round, and their probabilities."""
    draft_model = hf_models.with_noise(model, 0.3)
    prompt, count = PROMPTS[0], 3000
    with torch.no_grad():
        first = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        second = model(torch.tensor([[*prompt, x] for x in range(11)])).logits[:, -1].double()
    wanted = (first[:, None] * second.softmax(-1)).flatten()

    def distance(**settings):
        texts, _ = example.generate(
            model, [prompt] * count, 2, temperature=1.0, gamma=2, **settings
        )
        drawn = torch.tensor([11 * text[-2] + text[-1] for text in texts])
        found = torch.bincount(drawn, minlength=121) / count
        return float(((found - wanted) ** 2 / wanted).sum() * count)

    assert distance(draft_model=draft_model) < 185  # a chance of 0.0001 with 120 degrees of freedom
    assert distance() < 185

    def of_other_rows(*given):
        drafts, q = right(*given)
        return drafts, q._replace(logits=q.logits.roll(1, -1))

    right = example.draft
    with monkeypatch.context() as patched:
        patched.setitem(right.__globals__, "draft", of_other_rows)
        assert distance(draft_model=draft_model) > 185, "the control"
    alone = example.generate(model, PROMPTS[1:2], 24, temperature=1.0, seed=8)[0]
    assert alone[0] == example.generate(model, PROMPTS, 24, temperature=1.0, seed=7)[0][1]
