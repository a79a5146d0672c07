"""Candidate generators of Transformers as drafters."""

import pytest
import torch
from proofs import SIGNIFICANCE
from specdec_hf import from_candidate_generator
from support import hf_models
from support.drafter_proof import assert_greedy_identical, joint_p_value
from transformers import GenerationConfig
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    PromptLookupCandidateGenerator,
)


def assisted(model, **config):
    """A drafter of generators which draft with this model."""
    config = GenerationConfig(max_length=4096, min_length=0, top_k=0, pad_token_id=0, **config)

    def make(input_ids):
        made = AssistedCandidateGenerator(input_ids, model, config, {})
        made.num_assistant_tokens = 3
        return made

    return from_candidate_generator(make)


def test_a_single_generator_serves_one_call():
    model = hf_models.tiny("llama")
    one = from_candidate_generator(PromptLookupCandidateGenerator(max_length=4096))
    out = hf_models.decode(model, drafter=one)
    assert torch.equal(out.sequences, hf_models.decode(model).sequences)
    with pytest.raises(ValueError, match="which holds the text of the first"):
        hf_models.decode(model, drafter=one)
    with pytest.raises(TypeError, match="must be a CandidateGenerator of Transformers or a funct"):
        from_candidate_generator(3)


def test_an_assistant_drafts_greedy_text_and_is_verified_with_its_scores_where_it_samples():
    drafter = assisted(hf_models.perturbed("llama"))
    stats = assert_greedy_identical(lambda: drafter, hf_models.tiny("llama"), 12)
    assert stats.accepted > 0
    sampling = assisted(hf_models.build("llama", 1, vocab_size=4), do_sample=True)
    assert joint_p_value(sampling, texts=300, gamma=2) > SIGNIFICANCE
