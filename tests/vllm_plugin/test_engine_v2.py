"""The plug-in in vLLM engines with the V2 runner, whose Triton kernels run in the interpreter.

The models are random and small, so that the probabilities of whole texts can be computed.
"""

import functools

import pytest
import torch
from proofs import SIGNIFICANCE, chi_square, filtered_distribution, joint_distribution
from specdec_vllm import vllm_interface
from vllm_plugin import vllm_engine

pytest.importorskip("vllm", reason="`make more TASK=test-vllm` installs vLLM")
pytest.importorskip("triton", reason="the V2 runner is made of Triton kernels")
pytestmark = pytest.mark.timeout(580)

V = 8
PROMPTS = [[3, 1, 4, 1, 5, 3, 1, 4], [2, 7, 1, 2, 7], [6] * 5, [0, 5, 7, 0, 5, 7, 0]]
SAMPLES = 320
FILTERS = {"temperature": 0.9, "top_k": 6, "top_p": 0.95}


@pytest.fixture(scope="module")
def models(random_models):
    return random_models(V)


def requests(prompts=PROMPTS, max_tokens=12, **params):
    given = {"max_tokens": max_tokens, "ignore_eos": True, "detokenize": False} | params
    return [{"prompt": prompt, "params": given} for prompt in prompts]


GREEDY = {
    "plain": {}, "logprobs": {"logprobs": 2}, "allowed": {"allowed_token_ids": [0, 2, 3, 6]},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "min tokens": {"min_tokens": 6, "ignore_eos": False, "stop_token_ids": [1, 2, 3, 4]},
}  # fmt: skip


def greedy():
    return [r for params in GREEDY.values() for r in requests(temperature=0.0, **params)]


def seeded():
    params = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.02}
    return [r for i, p in enumerate(PROMPTS) for r in requests([p], seed=7 + i, **params)]


@pytest.fixture(scope="module")
def engine(models, tmp_path_factory):
    """Kind of drafts -> the outputs of each call by its name and rule."""

    @functools.cache
    def of(kind):
        speculation = None if kind == "none" else {"method": kind, "num_speculative_tokens": 2}
        sampled = requests(PROMPTS[:1], 2, n=SAMPLES, **FILTERS)
        calls = {("greedy", "token"): greedy(), ("seeded", "token"): seeded()}
        calls["one", "token"] = requests(PROMPTS[:1], temperature=0.0)
        if kind == "draft_model":
            speculation |= {"model": models[1], "draft_sample_method": "probabilistic"}
            calls[("reversed", "token")] = seeded()[::-1]
            calls |= {("sampled", rule): sampled for rule in ("token", "match")}
        if kind == "ngram_gpu":
            speculation |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
            calls["sampled", "block"] = sampled
        job = {"model": models[0], "speculation": speculation, "v2": True}
        job["engine"] = {"skip_tokenizer_init": True}
        job["calls"] = [
            {"plugin": True, "rule": rule, "requests": r} for (_, rule), r in calls.items()
        ]
        result = vllm_engine.run(job, tmp_path_factory.mktemp(kind))
        assert result["installed"], "vLLM has not found the entry point"
        assert result["sampler"] == vllm_interface.SAMPLER_V2
        return dict(zip(calls, result["calls"], strict=True))

    return of


def tokens(call):
    return [output["tokens"] for output in call["outputs"]]


DRAFTS = ["draft_model", "ngram_gpu"]


@pytest.mark.parametrize("kind", DRAFTS)
def test_greedy_text_is_that_without_drafts_and_takes_fewer_steps(engine, kind):
    """With penalties and the like too, whose kernels read the drafts before each row."""
    ours, theirs = (engine(k)["greedy", "token"] for k in (kind, "none"))
    assert tokens(ours) == tokens(theirs)
    assert len(set(map(tuple, tokens(ours)))) > len(PROMPTS)
    assert engine(kind)["one", "token"]["steps"] < engine("none")["one", "token"]["steps"]
    for one, other in zip(ours["outputs"], theirs["outputs"], strict=True):
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=2e-3)


def test_a_seed_gives_the_same_text_in_every_batch(engine):
    found = engine("draft_model")
    assert tokens(found["reversed", "token"])[::-1] == tokens(found["seeded", "token"])


@pytest.fixture(scope="module")
def probabilities(models):
    """[V, V] of the first two tokens after the first prompt, at a temperature, by transformers."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()

    def computed(temperature):
        with torch.no_grad():
            first = model(torch.tensor(PROMPTS[:1])).logits[0, -1]
            texts = torch.tensor([[*PROMPTS[0], t] for t in range(V)])
            second = model(texts).logits[:, -1]
        given = FILTERS | {"temperature": temperature}
        rows = [filtered_distribution(row, **given) for row in (first, *second)]
        return joint_distribution([rows[0], torch.stack(rows[1:])])

    return computed


@pytest.mark.parametrize(
    ("kind", "rule"), [("draft_model", "token"), ("draft_model", "match"), ("ngram_gpu", "block")]
)
def test_sampled_texts_follow_the_model(engine, probabilities, kind, rule):
    pairs = torch.tensor(tokens(engine(kind)["sampled", rule]))
    assert pairs.shape == (SAMPLES, 2)
    cells, wanted = pairs[:, 0] * V + pairs[:, 1], probabilities(FILTERS["temperature"]).flatten()
    assert chi_square(cells, wanted) > SIGNIFICANCE
    assert chi_square(cells, probabilities(2.0).flatten().clamp(min=1e-9)) < 1e-6, "the control"
