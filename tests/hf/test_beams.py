"""Beam search with drafts gives the sequences, scores and beams of Transformers' beam search."""

import pytest
import torch
import transformers
from specdec_hf import ModelDrafter, generate
from support import hf_models

from bench.tiny_models.build import build

pytestmark = pytest.mark.papers

RAGGED = (9, 4, 12)


def settings(num_beams, **kwargs):
    return {
        "num_beams": num_beams, "max_new_tokens": 15, "do_sample": False, "output_scores": True,
        "output_logits": True, "return_dict_in_generate": True, **kwargs,
    }  # fmt: skip


def search(model, inputs, drafter, kwargs, *, entry="generate", **options):
    options = {"drafter": drafter, "guard": False, **options}
    return hf_models.through(entry, model, inputs, options, **kwargs)


def assert_same(got, want):
    assert got.sequences.tolist() == want.sequences.tolist()
    assert got.beam_indices.tolist() == want.beam_indices.tolist()
    for name in ("sequences_scores", "scores", "logits"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-4)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("lengths", [(9,), RAGGED], ids=str)
@pytest.mark.parametrize("num_beams", [2, 3, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_beams_equal_those_of_model_generate(name, num_beams, lengths):
    model, inputs = hf_models.tiny(name), hf_models.prompts(lengths)
    kwargs = settings(num_beams, eos_token_id=[7, 11, 30], num_return_sequences=2)
    want = model.generate(**inputs, **kwargs)
    for drafter in (None, hf_models.perturbed(name), hf_models.tiny(name, 5)):
        got = search(model, inputs, drafter, kwargs, gamma=3)
        assert_same(got, want)
        assert got.stats.rounds <= len(want.scores)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
@pytest.mark.parametrize(
    "more",
    [
        {"length_penalty": 0.0, "early_stopping": "never"},
        {"length_penalty": 2.0, "early_stopping": True},
        {"length_penalty": -1.0, "early_stopping": "never", "pad_token_id": 5},
        {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
        {"min_new_tokens": 5, "renormalize_logits": True},
        {"prefix_allowed_tokens_fn": lambda b, ids: [t for t in range(1, 67) if t % 3 == b]},
    ],
    ids="-".join,
)
def test_every_argument_of_beam_search_is_honoured(more, entry, seed):
    model = hf_models.tiny("llama", seed)
    inputs = hf_models.prompts((11, 4, 3), seed=seed)
    kwargs = settings(3, **{"eos_token_id": [7, 11, 30, 41], **more})
    want = model.generate(**inputs, **kwargs)
    got = search(model, inputs, model, kwargs, entry=entry, gamma=4, num_assistant_beams=4)
    assert_same(got, want)


class _Ends(transformers.StoppingCriteria):
    """Ends a sequence at a token, one sequence at a time."""

    def __call__(self, ids, scores):
        assert len(ids) == 1 or scores is not None  # ours are called for one sequence
        return ids[:, -1] % 13 == 5


class _Ties(transformers.LogitsProcessor):
    """The best three tokens are among those of `_Ends`, and the fourth is one of a dozen."""

    def __call__(self, ids, scores):
        scores = (-60.0 - torch.arange(67.0)).repeat(len(scores), 1)
        scores[:, 6:18] = -3.0
        scores[:, [5, 18, 31]] = torch.tensor([-0.1, -0.2, -0.3])
        return scores


ENDS, MORE_ENDS = [7, 20, 30], [7, 11, 20, 30, 41]
HARD = {
    # Each beam's five best tokens end it, so that the best that goes on is candidate 5w + 1.
    "most candidates end": {
        "num_beams": 3, "max_new_tokens": 8, "eos_token_id": MORE_ENDS, "length_penalty": 2.0,
        "sequence_bias": [[[t], 12.0] for t in MORE_ENDS], "renormalize_logits": True,
        "early_stopping": "never",
    },
    # Fewer tokens are allowed than there are beams, and all beams are returned.
    **{
        f"{n} continuations": {
            "num_beams": 5, "num_return_sequences": 5, "eos_token_id": ENDS, "max_new_tokens": 6,
            "prefix_allowed_tokens_fn": lambda b, ids, n=n: [3 + b, 20 + b, 41, 50][:n],
        }
        for n in (1, 2, 4)
    },
    "a stopping criterion": {
        "num_beams": 3, "stopping_criteria": transformers.StoppingCriteriaList([_Ends()]),
    },
    # Of the best four candidates three end, and the penalty prefers what follows the fourth.
    "equal scores": {
        "num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 3, "length_penalty": 10.0,
        "early_stopping": "never", "logits_processor": transformers.LogitsProcessorList([_Ties()]),
        "stopping_criteria": transformers.StoppingCriteriaList([_Ends()]),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", HARD)
def test_beams_that_end_early_or_nowhere_are_those_of_model_generate(case):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    kwargs = settings(**HARD[case])
    want = model.generate(**inputs, **kwargs)
    for drafter in (None, model):
        assert_same(search(model, inputs, drafter, kwargs, gamma=3), want)


def test_drafted_beams_do_not_end():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 5))
    kwargs = settings(2, eos_token_id=[23, 37])
    want = model.generate(**inputs, **kwargs)
    got = search(model, inputs, model, kwargs, gamma=4, num_assistant_beams=2)
    assert_same(got, want)
    assert got.stats.acceptance_histogram == {0: 2, 4: 4, 3: 2}
    assert got.stats.gammas == [0, 2 * 4, 2 * 4, 2 * 3], "4 steps are left in the end"
    assert got.stats.seeds == [0, 0], "no noise"
    assert {one.stop_reason for one in got.stats.sequences} == {"length"}
    default, wide = (
        search(model, inputs, model, kwargs, gamma=4, **width)
        for width in ({}, {"num_assistant_beams": 4})
    )
    assert default.stats.gammas == wide.stats.gammas != got.stats.gammas
    ended = search(model, inputs, None, settings(2, eos_token_id=[56, 48, 23]))
    assert {one.stop_reason for one in ended.stats.sequences} == {"eos"}


def test_drafts_end_where_the_context_of_the_draft_model_does():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 12))
    drafter = ModelDrafter(hf_models.build("llama", context=20), draft_weights="float")
    got = search(model, inputs, drafter, settings(2), gamma=4, num_assistant_beams=2)
    # The longer text has 13 tokens after the round of the prompt, then 18, then 21.
    assert got.stats.gammas == [0, 2 * 4, 2 * 2, *[0] * 6]


IDS = torch.tensor([[11, 12, 13], [4, 9, 2]])
WITHOUT_TREES = {
    "t5": lambda: (hf_models.tiny("t5"), hf_models.texts((9, 5, 7))),
    "bart": lambda: (hf_models.tiny("bart"), hf_models.texts((9,))),
    "whisper": lambda: (hf_models.tiny("whisper"), hf_models.sounds(2)),
    "mamba": lambda: (build("MambaForCausalLM"), {"input_ids": IDS, "attention_mask": IDS**0}),
}


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
@pytest.mark.parametrize("name", WITHOUT_TREES)
def test_a_model_without_the_cache_for_trees_searches_by_itself(name, entry):
    model, inputs = WITHOUT_TREES[name]()
    kwargs = settings(3, eos_token_id=[7, 11, 30], num_return_sequences=2, max_new_tokens=9,
                      no_repeat_ngram_size=2, pad_token_id=0)  # fmt: skip
    got = search(model, inputs, None, kwargs, entry=entry)
    assert_same(got, model.generate(**inputs, **kwargs))
    if name == "whisper":
        return  # its own generate takes the output apart
    columns = got.beam_indices.shape[1]
    assert torch.equal(got.attention_mask[:, -columns:].bool(), got.beam_indices >= 0)
    assert got.attention_mask.shape == got.sequences.shape
    assert got.stats.drafter == "none"
    assert [one.stop_reason for one in got.stats.sequences] == ["length"] * len(got.stats.sequences)
    assert "searches with its own generate" in got.stats.notes[-1]
    plain = search(model, inputs, "auto", {"num_beams": 2, "max_new_tokens": 4}, entry=entry)
    want = model.generate(**inputs, num_beams=2, max_new_tokens=4)
    assert plain.tolist() == want.tolist()


@pytest.mark.parametrize("options", [{"cache": "spec"}, {"drafter": hf_models.tiny("llama")}])
def test_a_model_without_the_cache_for_trees_is_refused_where_it_is_asked_for(options):
    model = build("MambaForCausalLM")
    with pytest.raises(ValueError, match="MambaForCausalLM cannot be used with a tree of drafts"):
        generate(model, IDS, num_beams=2, max_new_tokens=2, **options)
