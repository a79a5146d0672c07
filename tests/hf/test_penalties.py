"""Processors that the op computes for all rows of a round, beside those asked one by one."""

import pytest
import torch
from specdec_hf import generate
from specdec_hf.extras import penalties, processors
from specdec_hf.extras.penalties import PresenceFrequencyPenalty, penalties_of
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

BIAS = SequenceBiasLogitsProcessor({(5,): 1.5, (9,): -2.0})
PAIR = SequenceBiasLogitsProcessor({(5, 6): 1.5})
REPETITION = RepetitionPenaltyLogitsProcessor(1.3)
COUNTED = PresenceFrequencyPenalty(0.4, 0.7, 4)
BAD = NoBadWordsLogitsProcessor([[7], [8]], eos_token_id=2)
SUPPRESSED = SuppressTokensLogitsProcessor([11, 12], device="cpu")
LEAST = MinNewTokensLengthLogitsProcessor(4, 6, [2], device="cpu")
TAKEN = [BIAS, REPETITION, COUNTED, BAD, SUPPRESSED, LEAST]


def test_what_the_op_has_no_place_for_is_left_to_the_processors():
    assert penalties_of(tuple(TAKEN)) is not None
    other = MinNewTokensLengthLogitsProcessor(4, 6, [3], device="cpu")
    ignoring = RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=2)
    for left in (
        [PAIR], [ignoring], [NoRepeatNGramLogitsProcessor(2)], [REPETITION, BIAS], [COUNTED, BIAS],
        [COUNTED, REPETITION], [REPETITION, REPETITION], [LEAST, other],
    ):  # fmt: skip
        assert penalties_of(tuple(left)) is None


def test_a_bias_outside_the_vocabulary_is_refused_as_by_transformers(model):
    outside = SequenceBiasLogitsProcessor({(10**6,): 1.0})
    with pytest.raises(ValueError, match="vocabulary"):
        generate(model, torch.tensor([[3, 9]]), max_new_tokens=2, logits_processor=[outside])


@pytest.mark.parametrize("drafter", ["prompt_lookup", None])
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_text_is_that_of_the_processors_asked_one_by_one(
    model, do_sample, drafter, monkeypatch
):
    """For a batch of which the processors of one kind are left to themselves, and one that all
    of the op serves; with scores, bit for bit."""
    ids = torch.tensor([[3, 9, 9, 4], [5, 6, 5, 6]])
    rows = []
    whole = penalties.penalise

    def watched(session, logits, drafts, listed):
        found = whole(session, logits, drafts, listed)
        rows.append(len(found))
        return found

    def text(listed, replaced):
        monkeypatch.setattr(processors, "penalise", replaced)
        return generate(
            model, ids, drafter=drafter, logits_processor=LogitsProcessorList(listed), seed=3,
            max_new_tokens=24, do_sample=do_sample, rule="match" if do_sample else "greedy",
            output_scores=True, return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip

    for listed, served in ((TAKEN, 2), ([*TAKEN, NoRepeatNGramLogitsProcessor(3)], 0)):
        rows.clear()
        got, want = text(listed, watched), text(listed, lambda *_: set())
        assert max(rows) == served  # less where a sequence has ended
        assert torch.equal(got.sequences, want.sequences)
        assert torch.equal(torch.stack(got.scores), torch.stack(want.scores))
