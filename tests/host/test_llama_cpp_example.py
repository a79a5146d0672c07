"""examples/llama_cpp_speculative.py emits the text of its model alone.

It runs on a stand-in with the interface of `llama_cpp.Llama`.
"""

import runpy
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/llama_cpp_speculative.py"

pytestmark = pytest.mark.skipif(not EXAMPLE.is_file(), reason="the examples are not here")
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def generate():
    return runpy.run_path(str(EXAMPLE))["generate"]


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
def test_the_text_is_that_of_the_model_alone(generate, temperature):
    for seed in range(4):
        how = dict(new_tokens=60, temperature=temperature, seed=seed)
        want, alone = generate(StandIn(), PROMPT, gamma=0, **how)
        got, calls = generate(StandIn(), PROMPT, **how)
        assert got == want
        assert len(got) == len(PROMPT) + 60
        assert calls < alone == 60


def test_the_text_ends_with_the_end_of_sequence(generate):
    llm = StandIn()
    (text, _) = generate(llm, PROMPT, 60, temperature=0.7)
    ending = text[len(PROMPT) + 10]
    llm.token_eos = lambda: ending
    got, _ = generate(llm, PROMPT, 60, temperature=0.7)
    assert got == text[: text.index(ending, len(PROMPT)) + 1]


def test_the_comparison_rejects_a_cache_that_keeps_rejected_drafts(generate):
    texts = [generate(StandIn(keeps=k), PROMPT, 60, temperature=0.7)[0] for k in (False, True)]
    assert texts[0] != texts[1]
