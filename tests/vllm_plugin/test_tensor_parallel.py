"""Two ranks of tensor parallelism on the CPU sample what one does, and both of them the same."""

from collections import defaultdict

import pytest
from vllm_plugin import vllm_engine

pytest.importorskip("vllm", reason="`make more TASK=test-vllm` installs vLLM")
pytestmark = pytest.mark.timeout(580)

V = 101  # no multiple of the ranks
PROMPTS = [[3, 1, 4, 1, 5, 9, 3, 1, 4], [2, 7, 1, 8, 2, 8, 2, 7], [6] * 5, [*range(20, 32)] * 2]
RULES = ["token", "match"]


@pytest.fixture(scope="module")
def models(random_models):
    return random_models(V)


def requests():
    """Greedy, seeded and unseeded requests of every prompt."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "min_p": 0.02, "seed": 5},
        {"temperature": 1.1, "top_k": 40},
    ]
    given = {"max_tokens": 24, "ignore_eos": True, "detokenize": False}
    return [{"prompt": p, "params": given | kind} for kind in kinds for p in PROMPTS]


@pytest.fixture(scope="module")
def engines(models, tmp_path_factory):
    """What one rank and two found, for each rule, and two that draw other seeds."""
    speculation = {
        "method": "draft_model", "model": models[1], "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    }  # fmt: skip
    calls = [{"rule": rule, "apart": False, "requests": requests()} for rule in RULES]
    found = {}
    for ranks in (1, 2):
        job = {"model": models[0], "speculation": speculation, "ranks": ranks, "calls": calls}
        if ranks == 2:
            job["calls"] = [*calls, calls[0] | {"apart": True}]
        found[ranks] = vllm_engine.run(job, tmp_path_factory.mktemp("ranks"))["calls"]
    return found


def tokens(call):
    return [output["tokens"] for output in call["outputs"]]


def sampled(steps):
    """The tokens of each request that a rank sampled, in the order of the requests' names."""
    texts = defaultdict(list)
    for names, _, rows in steps:
        for name, row in zip(names, rows, strict=True):
            texts[name] += [token for token in row if token >= 0]
    return texts


@pytest.mark.parametrize("index", range(len(RULES)), ids=RULES)
def test_two_ranks_give_the_texts_of_one(engines, index):
    one, two = engines[1][index], engines[2][index]
    assert tokens(one) == tokens(two)
    assert len(set(map(tuple, tokens(two)))) > 2 * len(PROMPTS)


@pytest.mark.parametrize("index", range(len(RULES)), ids=RULES)
def test_both_ranks_draft_and_sample_the_same(engines, index):
    first, second = engines[2][index]["ranks"]
    assert first == second
    # The last step of a request may sample more than it may have.
    texts = sorted(sampled(first).values())
    expected = sorted(tokens(engines[2][index]))
    assert [text[: len(want)] for text, want in zip(texts, expected, strict=True)] == expected
    lengths = [sum(token >= 0 for token in row) for _, _, rows in first for row in rows]
    assert max(lengths) > 1, "no draft was accepted"


def test_ranks_that_draw_other_seeds_sample_other_tokens(engines):
    """The negative control: requests without a seed then get different ones on the two ranks."""
    first, second = engines[2][-1]["ranks"]
    assert first != second
