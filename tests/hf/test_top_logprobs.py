"""Steps of a `BatchQueue` list the log probabilities of the model, of chains and of trees."""

import asyncio

import pytest
import torch
from specdec_hf import BatchQueue, SpeculativeDecoder
from specdec_hf.loop import drafted, rounds
from support import hf_models

MODEL = hf_models.build("llama")
DRAFTER = hf_models.with_noise(MODEL, 0.02)
PROMPTS = [[5, 6, 7, 5, 6], [8], [9, 4, 9, 4]]
SECONDS = 30  # that anything here may take at most


def decoded(queue, counts, new):
    """The steps of each prompt."""

    async def read(sequence):
        return [step async for step in sequence]

    async def decode():
        async with queue:
            sequences = [
                queue.submit(prompt, max_new_tokens=n, seed=n, top_k=9, num_top_logprobs=count)
                for prompt, count, n in zip(PROMPTS, counts, new, strict=True)
            ]
            return await asyncio.gather(*map(read, sequences))

    return asyncio.run(asyncio.wait_for(decode(), SECONDS))


@pytest.mark.parametrize("tree", [None, (2, 2)])
def test_each_token_has_the_log_probabilities_of_its_row(tree):
    """Also where drafts were accepted, and where a sequence has the place of one that has ended."""
    traced = []
    decoder = SpeculativeDecoder(DRAFTER, rule="match", tree=tree, trace=traced.append)
    found = decoded(BatchQueue(MODEL, decoder, batch_size=2), (3, None, 0), (9, 3, 14))
    for prompt, steps, count in zip(PROMPTS, found, (3, None, 0), strict=True):
        if count is None:
            assert all(step.top_logprobs == [] for step in steps)
            continue
        tokens = [token for step in steps for token in step.tokens]
        with torch.inference_mode():
            logits = MODEL(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        rows = logits.log_softmax(dim=-1)
        listed = [one for step in steps for one in step.top_logprobs]
        for token, one, row in zip(tokens, listed, rows, strict=True):
            likeliest = row.topk(count)
            assert [*one] == list(dict.fromkeys([token, *likeliest.indices.tolist()]))
            assert [*one.values()] == pytest.approx([float(row[t]) for t in one], abs=1e-4)
    assert any(len(step.tokens) > 1 for steps in found for step in steps), "no drafts"
    assert traced, "the trace of the decoder was lost"


def test_log_probabilities_need_no_trace(monkeypatch):
    """Nor does a queue: acceptance probabilities take time in every round."""
    verify, asked = drafted.verify_chain, []

    def watched(*args, with_accept_probs, **kwargs):
        asked.append(with_accept_probs)
        return verify(*args, with_accept_probs=with_accept_probs, **kwargs)

    monkeypatch.setattr(drafted, "verify_chain", watched)
    monkeypatch.setattr(rounds, "_traced", None)
    queue = BatchQueue(MODEL, SpeculativeDecoder(DRAFTER, rule="match"))
    found = decoded(queue, (3, None, 0), (9, 3, 14))
    assert sum(len(step.top_logprobs) for step in found[0]) == 9
    assert set(asked) == {False}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([1], ValueError, "num_top_logprobs must have 2 values, got 1"),
        ([1, -1], ValueError, "num_top_logprobs must be at least 0, got -1"),
        (2, TypeError, "num_top_logprobs must be a sequence, got 2"),
    ],
)
def test_counts_of_a_stream_are_refused_by_name(given, error, message):
    ids = torch.tensor([[4, 5], [6, 7]])
    with pytest.raises(error, match=message):
        next(SpeculativeDecoder(None).stream(MODEL, ids, num_top_logprobs=given))
