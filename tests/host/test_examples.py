"""docs/numpy.md and the examples of specdec_host: each emits the text of its model alone.

That of llama.cpp runs on a stand-in with the interface of `llama_cpp.Llama`.
"""

import re
import runpy
import types

import numpy as np
import pytest
import specdec_host
from support.sources import ROOT

PAGE = ROOT / "docs/numpy.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not here")


def example_of(name):
    return types.SimpleNamespace(**runpy.run_path(str(ROOT / f"examples/{name}_speculative.py")))


def test_the_code_of_the_numpy_page_runs_and_names_what_the_package_has():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    verdict = names["verdict"]
    assert verdict.tokens.shape == (2, 6)
    assert (verdict.num_accepted > 0).any()
    assert not verdict.status.any()
    named = re.findall(r"specdec_host\.(\w+)", PAGE.read_text())
    assert named
    assert all(hasattr(specdec_host, name) for name in named)


# ONNX Runtime.


@pytest.fixture(scope="module")
def onnx():
    for package in ("onnx", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    return example_of("onnx")


def plain(model, prompt, temperature, seed):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + 24:
        tokens.append(model.next_token(tokens, temperature, seed))
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("noise", [0.0, 0.2, 5.0])
def test_the_text_with_two_onnx_models_is_that_of_the_target_alone(onnx, noise, temperature):
    target, drafter = onnx.Model(onnx.tiny_model()), onnx.Model(onnx.tiny_model(noise))
    for seed in range(3):
        prompt = [1 + seed, 2, 3]
        tokens, calls = onnx.generate(
            target, drafter, prompt, 24, temperature=temperature, seed=seed
        )
        assert tokens == plain(target, prompt, temperature, seed)
        assert tokens != plain(target, prompt, temperature, seed + 1) or temperature == 0
        assert 24 / 5 <= calls <= 24
        if noise == 0:
            assert calls == 5  # every draft is accepted


# llama.cpp.

PROMPT = [3, 1, 4, 1, 5]


class StandIn:
    """Its logits depend on the last three tokens. As in llama.cpp, `eval` reads behind `n_tokens`.

    A token that is read alone has other logits; in llama.cpp other kernels compute and round them.

    keeps: rejected drafts stay in the cache, as if nobody had rolled it back.
    """

    def __init__(self, vocab=9, keeps=False):
        self.table = np.random.default_rng(0).normal(0, 2, (vocab, vocab, vocab))
        self.scores = np.zeros((512, vocab), np.single)
        self.input_ids = np.zeros(512, np.intc)
        self.keeps = keeps
        self.reset()

    def reset(self):
        self.n_tokens = self.end = 0

    def token_eos(self):
        return len(self.table)

    def eval(self, tokens):
        begin = self.end if self.keeps else self.n_tokens
        for i, token in enumerate(tokens, begin):
            self.input_ids[i] = token
            above = self.input_ids[max(i - 2, 0) : i].sum() % len(self.table)
            self.scores[i] = self.table[above, token]
            if len(tokens) == 1:
                self.scores[i] = self.scores[i, ::-1]
        self.n_tokens = self.end = begin + len(tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_text_with_llama_cpp_is_that_of_the_model_alone(temperature):
    generate = example_of("llama_cpp").generate
    for seed in range(4):
        how = dict(new_tokens=60, temperature=temperature, seed=seed)
        want, alone = generate(StandIn(), PROMPT, gamma=0, **how)
        got, calls = generate(StandIn(), PROMPT, **how)
        assert got == want
        assert len(got) == len(PROMPT) + 60
        assert calls < alone == 60
    if temperature:
        assert generate(StandIn(keeps=True), PROMPT, **how)[0] != want, "the control"
        llm = StandIn()
        ending = want[len(PROMPT) + 10]
        llm.token_eos = lambda: ending
        got, _ = generate(llm, PROMPT, **how)
        assert got == want[: want.index(ending, len(PROMPT)) + 1]
