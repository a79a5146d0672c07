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
pytestmark = pytest.mark.timeout(1170)  # a test may start two engines

V = 8
PROMPTS = [[3, 1, 4, 1, 5, 3, 1, 4], [2, 7, 1, 2, 7], [6] * 5, [0, 5, 7, 0, 5, 7, 0]]
SAMPLES = 320
FILTERS = {"temperature": 0.9, "top_k": 6, "top_p": 0.95}
# Kind of drafts -> the rules that verify those of sampled texts.
SAMPLED = {"draft_model": ["token", "match"], "ngram_gpu": ["block"], "eagle3": ["token"]}


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
        calls = {"greedy": greedy(), "one": requests(PROMPTS[:1], temperature=0.0)}
        speculation = None
        if kind in SAMPLED:
            calls |= {"seeded": seeded(), "reversed": seeded()[::-1]}
            speculation = {"method": kind, "num_speculative_tokens": 2}
        calls = {(name, "token"): given for name, given in calls.items()}
        sampled = requests(PROMPTS[:1], 2, n=SAMPLES, **FILTERS)
        calls |= {("sampled", rule): sampled for rule in SAMPLED.get(kind, ())}
        if kind == "ngram_gpu":
            speculation |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        elif speculation:
            model = models[1 if kind == "draft_model" else 2]
            speculation |= {"model": model, "draft_sample_method": "probabilistic"}
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


@pytest.mark.parametrize("kind", SAMPLED)
def test_greedy_text_is_that_without_drafts_and_takes_fewer_steps(engine, kind):
    """With penalties and the like too, whose kernels read the drafts before each row."""
    ours, theirs = (engine(k)["greedy", "token"] for k in (kind, "none"))
    assert tokens(ours) == tokens(theirs)
    assert len(set(map(tuple, tokens(ours)))) > len(PROMPTS)
    if kind != "eagle3":  # the head knows nothing of the model
        assert engine(kind)["one", "token"]["steps"] < engine("none")["one", "token"]["steps"]
    for one, other in zip(ours["outputs"], theirs["outputs"], strict=True):
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=2e-3)


@pytest.mark.parametrize("kind", SAMPLED)
def test_a_seed_gives_the_same_text_in_every_batch(engine, kind):
    found = engine(kind)
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


@pytest.mark.parametrize(("kind", "rule"), [(k, r) for k, rules in SAMPLED.items() for r in rules])
def test_sampled_texts_follow_the_model(engine, probabilities, kind, rule):
    pairs = torch.tensor(tokens(engine(kind)["sampled", rule]))
    assert pairs.shape == (SAMPLES, 2)
    cells, wanted = pairs[:, 0] * V + pairs[:, 1], probabilities(FILTERS["temperature"]).flatten()
    assert chi_square(cells, wanted) > SIGNIFICANCE
    assert chi_square(cells, probabilities(2.0).flatten().clamp(min=1e-9)) < 1e-6, "the control"
