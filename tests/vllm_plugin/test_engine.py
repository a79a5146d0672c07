"""The plug-in in a real vLLM engine on SmolLM2-135M, with drafts of three kinds.

An engine takes long to start, so each kind has one process, in which the plug-in is also undone to
see what vLLM does by itself.
"""

import functools
import os
import random
from itertools import chain

import pytest
import torch
from scipy.stats import kstest
from vllm_plugin import vllm_engine

pytest.importorskip("vllm", reason="`make more TASK=test-vllm` installs vLLM")
MODEL = os.environ.get("SPECDEC_TEST_MODEL")
pytestmark = [
    pytest.mark.skipif(not MODEL, reason="SPECDEC_TEST_MODEL names no model folder"),
    pytest.mark.timeout(580),
]

SPECULATIONS = {
    "ngram": dict(num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1),
    "draft_model": dict(num_speculative_tokens=2, model=MODEL, draft_sample_method="probabilistic"),
    "custom_class": dict(num_speculative_tokens=4, model="specdec_vllm.Proposer"),
}
TEXTS = (
    "One two three four one two three four one two three four one two",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "The cat sat on the mat. The dog sat on the rug. The cat sat on the",
    "Question: What is the capital of France? Answer: The capital of France is",
)
# The distribution that is tested is that of the second token after the first of these texts, for
# first tokens that are in the text: the n-gram drafter finds them there, and drafts.
SAMPLES, TEMPERATURE, TOP_P, TOP_K = 192, 0.8, 0.9, 30


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def requests(prompts, **params):
    return [
        {"prompt": p, "params": {"max_tokens": 24, "ignore_eos": True} | params} for p in prompts
    ]


def greedy(prompts):
    """Greedy requests, which must give the same text with drafts and without, by their kind."""
    given = dict(temperature=0.0)
    return {
        "plain": requests(prompts, **given),
        "logprobs": requests(prompts, **given, logprobs=2),
        "penalties": requests(prompts, **given, repetition_penalty=1.3),
        "bad words": requests(prompts, **given, bad_words=[" the", " three"]),
        "min tokens": requests(
            prompts, **given, min_tokens=16, ignore_eos=False, stop_token_ids=[2]
        ),
    }


CHOICE = [" three four one", " red and green", " seventeen"]


def seeded(prompts):
    shared = {"temperature": 0.8, "top_p": 0.95}
    return [r for i, p in enumerate(prompts) for r in requests([p], **shared, seed=7 + i)]


def samples(prompts, **params):
    given = {"max_tokens": 2, "ignore_eos": True, "temperature": TEMPERATURE} | params
    return [{"prompt": prompts[0], "params": given | {"n": SAMPLES}}]


FILTERS = {"samples": {}, "filtered": {"top_k": TOP_K, "top_p": TOP_P, "min_p": 0.02}}
# Kind of drafts -> filters and rules. Those of the proposer are verified as n-grams are.
SAMPLED = {
    "ngram": [("samples", "token"), ("filtered", "match")],
    "draft_model": [("samples", "token"), ("filtered", "block"), ("filtered", "match")],
    "custom_class": [],
}


def generated(speculation, calls, folder):
    """Outputs and steps of each call, whose key is (name, rule or None without the plug-in)."""
    job = {"model": MODEL, "speculation": speculation}
    job["calls"] = [
        {"plugin": rule is not None, "rule": rule, "requests": r} for (_, rule), r in calls.items()
    ]
    result = vllm_engine.run(job, folder)
    found = [(call["outputs"], call["steps"]) for call in result["calls"]]
    outputs, steps = (dict(zip(calls, part, strict=True)) for part in zip(*found, strict=True))
    return result["installed"], outputs, steps


def split(outputs, groups):
    """The outputs of each group of requests that were in one call."""
    rest = iter(outputs)
    return {name: [next(rest) for _ in group] for name, group in groups.items()}


@pytest.fixture(scope="module")
def plain(prompts, tmp_path_factory):
    """Greedy outputs of vLLM without speculation, the plug-in switched off by the environment."""
    groups = greedy(prompts)
    calls = {("greedy", None): [*chain.from_iterable(groups.values())]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_VLLM", "0")
        installed, found, _ = generated(None, calls, tmp_path_factory.mktemp("plain"))
    assert not installed
    return split(found["greedy", None], groups)


@pytest.fixture(scope="module")
def engine(prompts, tmp_path_factory):
    """Kind -> outputs by (name, rule), and those of greedy requests by their kind.

    Greedy requests of all kinds and sampled ones are in the engine together.
    """

    @functools.cache
    def of(kind):
        folder = tmp_path_factory.mktemp(kind)
        groups = greedy(prompts) | {"seeds together": seeded(prompts)}
        groups["choice"] = requests(prompts, temperature=1.0, choice=CHOICE, ignore_eos=False)
        calls = {
            ("together", "token"): [*chain.from_iterable(groups.values())],
            ("seeds reversed", "token"): seeded(prompts)[::-1],
            ("seeds alone", "token"): seeded(prompts)[1:2],
        }
        calls |= {(name, rule): samples(prompts, **FILTERS[name]) for name, rule in SAMPLED[kind]}
        if kind == "ngram":
            calls["samples", None] = samples(prompts)
        if kind == "custom_class":
            calls |= {("one", rule): groups["plain"][:1] for rule in ("token", None)}
        installed, found, steps = generated({"method": kind} | SPECULATIONS[kind], calls, folder)
        assert installed, "vLLM has not found the entry point"
        return found | split(found["together", "token"], groups) | {"steps": steps}

    return of


def tokens(outputs):
    return [output["tokens"] for output in outputs]


@pytest.mark.parametrize("kind", SPECULATIONS)
def test_greedy_text_is_that_without_drafts_under_all_parameters(engine, plain, kind):
    found = engine(kind)
    ours, theirs = ({name: tokens(of[name]) for name in plain} for of in (found, plain))
    assert ours == theirs
    for ours, theirs in zip(found["logprobs"], plain["logprobs"], strict=True):
        assert len(ours["logprobs"]) == len(ours["tokens"])
        torch.testing.assert_close(
            torch.tensor(ours["logprobs"]), torch.tensor(theirs["logprobs"]), atol=2e-3, rtol=0
        )


@pytest.mark.parametrize("kind", SPECULATIONS)
def test_a_seed_gives_the_same_text_in_every_batch_of_an_engine(engine, kind):
    found = engine(kind)
    together = tokens(found["seeds together"])
    assert tokens(found["seeds reversed", "token"])[::-1] == together
    assert tokens(found["seeds alone", "token"]) == together[1:2]
    assert len({tuple(t) for t in together}) == len(together)
    # Structured output allows nothing else.
    assert {output["text"] for output in found["choice"]} <= {*CHOICE}


@pytest.mark.parametrize("rule", ["token", None])
def test_the_drafts_of_the_proposer_save_steps(engine, plain, rule):
    """With the plug-in and with vLLM's own verification; without drafts a token takes a step."""
    found = engine("custom_class")
    assert tokens(found["one", rule]) == tokens(plain["plain"][:1])
    assert found["steps"]["one", rule] < 12


@pytest.fixture(scope="module")
def second_logits(prompts):
    """Logits after the first prompt and each of some tokens, by transformers."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    def logits(firsts):
        with torch.no_grad():
            return model(torch.tensor([[*prompts[0], t] for t in firsts])).logits[:, -1].double()

    return logits


def p_value(outputs, prompt, second_logits, temperature=TEMPERATURE, top_k=None, top_p=1, min_p=0):
    """Of the second tokens, each as a uniform number by the CDF that its first token gives.

    A token's number is uniform in the interval of the CDF that belongs to it.
    """
    pairs = [(a, b) for a, b in tokens(outputs) if a in prompt]
    assert len(pairs) > SAMPLES / 2
    uniform, numbers, tables = random.Random(0), [], {}
    firsts = sorted({a for a, _ in pairs})
    for first, logits in zip(firsts, second_logits(firsts), strict=True):
        # The tokens by falling probability, filtered in the order of vLLM.
        probs, order = (logits / temperature).softmax(-1).sort(descending=True)
        probs[probs < min_p * probs[0]] = 0
        probs[top_k or len(probs) :] = 0
        probs /= probs.sum()
        probs[probs.cumsum(0) - probs >= top_p] = 0
        tables[first] = order.tolist(), probs / probs.sum()
    for first, second in pairs:
        order, probs = tables[first]
        rank = order.index(second)
        if probs[rank] == 0:
            return 0.0
        numbers.append(float(probs[:rank].sum() + uniform.random() * probs[rank]))
    return kstest(numbers, "uniform").pvalue


@pytest.mark.parametrize(
    ("kind", "name", "rule"), [(kind, *one) for kind, listed in SAMPLED.items() for one in listed]
)
def test_sampled_tokens_follow_the_distribution_of_the_model(
    engine, prompts, second_logits, kind, name, rule
):
    given = engine(kind)[name, rule], prompts[0], second_logits
    assert p_value(*given, **FILTERS[name]) > 1e-4
    if name == "samples":
        assert p_value(*given, temperature=1.4) < 1e-4, "the control"


def test_sampled_tokens_of_vllm_by_itself_do_not_follow_it(engine, prompts, second_logits):
    """On the CPU, where its temperature comes from unwritten memory."""
    assert p_value(engine("ngram")["samples", None], prompts[0], second_logits) < 1e-8
