"""examples/onnx_speculative.py emits the text of its target alone. Needs onnx and onnxruntime."""

import runpy
import sys
import types
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/onnx_speculative.py"

pytestmark = pytest.mark.skipif(not EXAMPLE.is_file(), reason="the examples are not here")


@pytest.fixture(scope="module")
def example():
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    return types.SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


@pytest.fixture(scope="module")
def target(example):
    return example.Model(example.tiny_model())


def plain(model, prompt, new_tokens, temperature, seed):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + new_tokens:
        tokens.append(model.next_token(tokens, temperature, seed))
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("noise", [0.0, 0.2, 5.0])
def test_the_text_is_that_of_the_target_alone(example, target, noise, temperature):
    drafter = example.Model(example.tiny_model(noise))
    for seed in range(3):
        prompt = [1 + seed, 2, 3]
        want = plain(target, prompt, 24, temperature, seed)
        tokens, calls = example.generate(
            target, drafter, prompt, 24, temperature=temperature, seed=seed
        )
        assert tokens == want
        assert tokens != plain(target, prompt, 24, temperature, seed + 1) or temperature == 0
        assert 24 / 5 <= calls <= 24
        if noise == 0:
            assert calls == 5  # every draft is accepted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_of_the_drafter_without_a_distribution_ends_the_draft(example, target, temperature):
    class Faulty(example.Model):
        def logits(self, tokens, rows):
            assert min(tokens) >= 0
            logits = super().logits(tokens, rows)
            return logits * np.nan if len(tokens) % 3 == 0 else logits

    drafter = Faulty(example.tiny_model())
    tokens, calls = example.generate(target, drafter, [1, 2, 3], 24, temperature=temperature)
    assert tokens == plain(target, [1, 2, 3], 24, temperature, 0)
    assert calls == 9  # after the first token, three in a round


def test_the_example_prints_its_texts(example, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["onnx_speculative.py"])
    example.main()
    assert capsys.readouterr().out.count("calls of the target") == 2
