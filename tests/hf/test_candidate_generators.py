"""Candidate generators of Transformers as drafters."""

import numpy as np
import pytest
import torch
from specdec_hf import from_candidate_generator
from specdec_hf.drafting.drafter import DraftOutcome
from support import hf_models
from support.drafter_proof import (
    SIGNIFICANCE,
    assert_greedy_identical,
    context_of,
    history_of,
    joint_p_value,
    propose,
)
from transformers import GenerationConfig
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    PromptLookupCandidateGenerator,
)


def assisted(model, **config):
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


def test_a_round_without_drafts_does_not_hide_how_many_of_the_last_ones_were_accepted():
    told = []

    class Tells(PromptLookupCandidateGenerator):
        def update_candidate_strategy(self, input_ids, scores, num_matches):
            told.append((scores.shape[1] - 1, num_matches))

    drafter = from_candidate_generator(lambda ids: Tells(max_length=4096))
    drafter.start(context_of(hf_models.tiny("llama")))
    text = [5, 6, 7, 8, 5, 6]
    for limit, accepted in ((2, 2), (0, 0), (2, 1), (2, 0)):
        draft = propose(drafter, history_of(text), limit)
        tokens = np.zeros((1, 0), np.int64) if draft is None else draft.tokens.numpy()
        drafter.commit(DraftOutcome.of_chain(np.array([6]), np.array([accepted]), tokens))
    assert told == [(2, 2), (2, 1)]


def test_an_assistant_drafts_greedy_text_and_is_verified_with_its_scores_where_it_samples():
    drafter = assisted(hf_models.perturbed("llama"))
    stats = assert_greedy_identical(lambda: drafter, hf_models.tiny("llama"), 12)
    assert stats.accepted > 0
    sampling = assisted(hf_models.build("llama", 1, vocab_size=4), do_sample=True)
    assert joint_p_value(sampling, texts=300, gamma=2) > SIGNIFICANCE
