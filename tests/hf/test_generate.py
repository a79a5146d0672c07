"""The loop on tiny models: its text equals plain decoding, and stops where that stops."""

import pytest
import torch
from support import drafter_proof, hf_models
from support.hf_models import NEW, RAGGED, SAMPLED, run
from transformers import StoppingCriteria, StoppingCriteriaList

pytestmark = pytest.mark.quick


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("drafter", ["prompt_lookup", "model", "none"])
@pytest.mark.parametrize(
    ("lengths", "cache"), [((9,), "spec"), ((9,), "dynamic"), (RAGGED, "spec")], ids=str
)
@pytest.mark.parametrize("name", hf_models.NAMES)
def test_the_text_is_that_of_plain_decoding(name, lengths, cache, drafter, gamma):
    """Greedy, that of the model's own generate; by rule match, that of sampling without drafts."""
    model, inputs = hf_models.tiny(name), hf_models.prompts(lengths)
    proposer = None if drafter == "none" else hf_models.drafter_for(name, drafter)
    options = {"drafter": proposer, "gamma": gamma, "cache": cache}
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    got = run(model, inputs, **options)
    torch.testing.assert_close(got.sequences, expected, rtol=0, atol=0)
    if drafter == "model":
        assert got.stats.accepted > 0, "a drafter that is never right proves little"
    plain = run(model, inputs, rule="match", **SAMPLED)
    got = run(model, inputs, rule="match", **options, **SAMPLED)
    torch.testing.assert_close(got.sequences, plain.sequences, rtol=0, atol=0)
    torch.testing.assert_close(got.logprobs, plain.logprobs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tree", [None, (3, 2)], ids=["chain", "tree"])
def test_sampling_parameters_per_sequence(tree):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 9))
    inputs["input_ids"][1] = inputs["input_ids"][0]
    drafts = {"drafter": hf_models.perturbed("llama"), "tree": tree}
    mixed = run(
        model, inputs, **drafts, do_sample=True, seed=[4, 5], temperature=[0.0, 0.7],
        top_k=[2**40, 20], top_p=torch.tensor([1.0, 0.95]),
    )  # fmt: skip
    greedy = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert mixed.sequences[0].tolist() == greedy[0].tolist()
    second = {key: value[1:] for key, value in inputs.items()}
    sampled = run(model, second, **drafts, **SAMPLED)
    assert mixed.sequences[1].tolist() == sampled.sequences[0].tolist()


def proposer(name, kind):
    if kind in ("prompt_lookup", "model"):
        return {"drafter": hf_models.drafter_for(name, kind)}
    return dict(zip(("drafter", "tree"), drafter_proof.tree_drafters(name)[kind], strict=True))


def of_trees(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    ("new_tokens", "kind"),
    [
        *((n, "model") for n in (1, 2, 3, 7)),
        *of_trees((1, "branching"), (2, "eagle"), (3, "trie of models")),
    ],
)
def test_max_new_tokens_is_exact(new_tokens, kind):
    model, inputs = hf_models.tiny("gemma2"), hf_models.prompts(RAGGED)
    expected = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    got = run(model, inputs, **proposer("gemma2", kind), max_new_tokens=new_tokens)
    assert got.sequences.tolist() == expected.tolist()
    assert [one.new_tokens for one in got.stats.sequences] == [new_tokens] * 3
    assert {one.stop_reason for one in got.stats.sequences} == {"length"}
    # The round of the prompt drafts nothing, and the last token is never drafted.
    assert all(one.drafted == 0 for one in got.stats.sequences) == (new_tokens <= 2)
    by_length = run(
        model, inputs, max_new_tokens=None, max_length=inputs["input_ids"].shape[1] + new_tokens
    )
    assert by_length.sequences.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("lengths", "kind"),
    [
        *((lengths, kind) for lengths in ((9,), RAGGED) for kind in ("prompt_lookup", "model")),
        *of_trees((RAGGED, "two models"), (RAGGED, "trie of all")),
    ],
)
def test_end_of_sequence_inside_a_draft_ends_the_text(lengths, kind):
    model, inputs = hf_models.tiny("gemma2"), hf_models.prompts(lengths)
    free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[:, -NEW:]
    for at in (2, 5, 9):
        ends = [int(free[0, at]), int(free[-1, at + 4])]
        kwargs = {"max_new_tokens": NEW, "eos_token_id": ends, "pad_token_id": hf_models.PAD}
        expected = model.generate(**inputs, do_sample=False, **kwargs)
        got = run(model, inputs, **proposer("gemma2", kind), **kwargs)
        assert got.sequences.tolist() == expected.tolist()
        assert got.attention_mask.sum() == inputs["attention_mask"].sum() + got.stats.new_tokens


class EndsWith(StoppingCriteria):
    """Stops after two given tokens; remembers the length of every prefix it was shown."""

    def __init__(self, pair):
        self.pair = torch.tensor(pair)
        self.lengths = []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return (input_ids[:, -2:] == self.pair).all(dim=1)


@pytest.mark.parametrize(
    ("cache", "tree"),
    [("spec", None), ("dynamic", None), pytest.param("spec", (2, 2), marks=pytest.mark.slow)],
)
def test_custom_stopping_criteria_see_every_prefix_once(cache, tree):
    model, inputs = hf_models.tiny("gpt2"), hf_models.prompts((9,))
    free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, -NEW:].tolist()
    mine, theirs = EndsWith(free[6:8]), EndsWith(free[6:8])
    expected = model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False,
        stopping_criteria=StoppingCriteriaList([theirs]),
    )  # fmt: skip
    got = run(
        model, inputs, drafter=hf_models.perturbed("gpt2"), cache=cache, tree=tree,
        stopping_criteria=StoppingCriteriaList([mine]),
    )  # fmt: skip
    assert got.sequences.tolist() == expected.tolist()
    assert mine.lengths == theirs.lengths
    assert got.stats.sequences[0].stop_reason == "criteria"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_context_ends_generation(name):
    model = hf_models.build(name, context=32)
    inputs = hf_models.prompts((20, 26))
    drafter = hf_models.with_noise(model, 0.1)
    got = run(model, inputs, drafter=drafter, max_new_tokens=50, gamma=6)
    assert [one.new_tokens for one in got.stats.sequences] == [12, 6]
    assert {one.stop_reason for one in got.stats.sequences} == {"context"}
    assert "stopped at the model's context length" in got.stats.notes
    long = model.generate(
        **{key: value[:1, -20:] for key, value in inputs.items()},
        max_new_tokens=12,
        do_sample=False,
    )
    assert got.sequences[0, -12:].tolist() == long[0, -12:].tolist()


@pytest.mark.parametrize("tree", [None, (2, 2)], ids=["chain", "tree"])
def test_logits_that_are_not_finite_name_sequence_and_position(tree):
    model = hf_models.build("llama")
    inputs = hf_models.prompts((9, 4))
    poison = int(model.generate(**inputs, max_new_tokens=3, do_sample=False)[1, -1])
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = float("nan")
    inputs["input_ids"][inputs["input_ids"] == poison] = (poison + 1) % hf_models.VOCAB
    with pytest.raises(RuntimeError, match=r"logits of sequence \d at position \d+ are not finite"):
        run(model, inputs, drafter=hf_models.tiny("llama") if tree else "prompt_lookup", tree=tree)
