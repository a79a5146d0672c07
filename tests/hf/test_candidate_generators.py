"""Candidate generators of Transformers as drafters."""

import pytest
import torch
from specdec_hf import from_candidate_generator, generate
from support import hf_models
from support.drafter_proof import assert_greedy_identical, joint_p_value
from support.providers import SIGNIFICANCE
from transformers import GenerationConfig
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    PromptLookupCandidateGenerator,
    SinglePositionMultiTokenCandidateGenerator,
)


def assisted(model, do_sample=False):
    """A function that makes generators which draft with this model."""
    config = GenerationConfig(
        do_sample=do_sample, max_length=4096, min_length=0, top_k=0, pad_token_id=0
    )

    def make(input_ids):
        made = AssistedCandidateGenerator(input_ids, model, config, {})
        made.num_assistant_tokens = 3
        return made

    return make


class Table(CandidateGenerator):
    """Draws every draft from one row of a table, and hands that out as its logits."""

    def __init__(self, input_ids=None, vocab_size=4, count=3):
        self.logits = torch.linspace(0, 1.5, vocab_size)
        self.count = count
        self.told = []

    def get_candidates(self, input_ids, **kwargs):
        drawn = self.logits.softmax(0).multinomial(self.count, replacement=True)
        rows = self.logits.expand(1, self.count, -1)
        return torch.cat([input_ids, drawn[None]], dim=1), rows

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        self.told.append((input_ids.tolist()[0], tuple(scores.shape), num_matches))
        assert scores.isnan().all()


def test_greedy_text_by_an_assistant_is_that_of_plain_generation():
    drafter = from_candidate_generator(assisted(hf_models.perturbed("llama")))
    stats = assert_greedy_identical(lambda: drafter, hf_models.tiny("llama"), 12)
    assert stats.accepted > 0
    assert stats.drafter == "candidate_generator"


def test_one_generator_serves_one_sequence_of_one_call():
    generator = PromptLookupCandidateGenerator(num_output_tokens=4, max_length=4096)
    model, drafter = hf_models.tiny("llama"), from_candidate_generator(generator)
    with pytest.raises(ValueError, match=r"needs a function .* with batch size 3, got one P"):
        hf_models.decode(model, (9, 4, 12), drafter=drafter)
    hf_models.decode_as_generate(model, drafter=drafter)
    with pytest.raises(ValueError, match="to serve several calls, got one PromptLookupCandidateGe"):
        hf_models.decode(model, drafter=drafter)


def test_what_is_no_generator_is_named():
    class Short(Table):
        def get_candidates(self, input_ids, **kwargs):
            return input_ids[:, :-1], None

    class Fed(Table):
        requires_model_outputs = SinglePositionMultiTokenCandidateGenerator.requires_model_outputs

    assert Fed.requires_model_outputs
    with pytest.raises(TypeError, match="generator must be a CandidateGenerator of Transformers o"):
        from_candidate_generator(3)
    for make, error, message in (
        (lambda ids: 3, TypeError, "must make a CandidateGenerator, got 3"),
        (Short, ValueError, r"Short.get_candidates must .* \[1, 10 or more\], got \[1, 9\]"),
        (Fed, ValueError, "Fed is not supported by from_candidate_generator: it needs the targ"),
    ):
        with pytest.raises(error, match=message):
            hf_models.decode(hf_models.tiny("llama"), drafter=from_candidate_generator(make))


def test_a_generator_learns_what_was_kept():
    made = Table(vocab_size=hf_models.VOCAB)
    drafter = from_candidate_generator(made)
    out = hf_models.decode(hf_models.tiny("llama"), drafter=drafter, seed=1, do_sample=True)
    text = out.sequences[0].tolist()
    assert len(made.told) > 3
    length = 9 + 1  # the first token is not drafted
    for told, shape, matches in made.told:
        assert told == text[: len(told)]
        assert len(told) == length + matches + 1
        drafted = min(3, 9 + 12 - length - 1)
        assert shape == (1, drafted + 1, hf_models.VOCAB)
        length = len(told)


def test_random_numbers_are_seeded_by_sequence_and_leave_torchs_alone():
    model = hf_models.tiny("llama")
    settings = {"max_new_tokens": 10, "do_sample": True, "seed": [5, 7], "guard": False}
    inputs = hf_models.prompts((9, 4))
    drafter = from_candidate_generator(lambda ids: Table(ids, hf_models.VOCAB))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    both = generate(model, **inputs, **settings, drafter=drafter)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    settings["seed"] = [7]
    alone = generate(
        model, inputs["input_ids"][1:, 5:], **settings, drafter=drafter,
    )  # fmt: skip
    assert alone[0].tolist() == both[1, 5:].tolist()


@pytest.mark.full
def test_drafts_of_a_sampling_assistant_are_verified_with_its_scores():
    drafter = from_candidate_generator(assisted(hf_models.build("llama", 1, vocab_size=4), True))
    assert joint_p_value(drafter, texts=300, gamma=2) > SIGNIFICANCE
