"""Ragged batches of a server through the ops, without vLLM."""

from types import SimpleNamespace

import pytest
import torch
from specdec_vllm import faults, verification
from specdec_vllm.parameters import Parameters
from specdec_vllm.tensors import dense_drafts, probabilities, scaled_logits, seeds_for
from specdec_vllm.verification import Acceptance, sample_rows, verify

V = 11
COUNTS = [2, 0, 3, 1]


def batch(copies=1, seed=0):
    """Rows, drafts, their probabilities, and where each sequence's rows begin."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(COUNTS * copies)
    indptr = torch.nn.functional.pad((counts + 1).cumsum(0), (1, 0)).int()
    total = sum(COUNTS) + len(COUNTS)
    rows = 2 * torch.randn(total, V, generator=generator)
    q = torch.randn(sum(COUNTS), V, generator=generator).softmax(-1)
    drafts = torch.multinomial(q.repeat(copies, 1), 1, generator=generator)[:, 0].int()
    return rows.repeat(copies, 1), drafts, q.repeat(copies, 1), indptr, counts


def parameters(number, **given):
    noise = {"seeds": torch.arange(number) + 5, "positions": torch.full((number,), 40)}
    return Parameters(
        **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | noise | given
    )


def test_drafts_of_a_flat_vector_become_columns():
    starts, lengths = torch.tensor([0, 2, 2]), torch.tensor([2, 0, 3])
    dense = dense_drafts(torch.tensor([5, 6, 7, 8, 9]).int(), starts, lengths, 3)
    assert dense.tolist() == [[5, 6, -1], [-1, -1, -1], [7, 8, 9]]
    assert dense.dtype == torch.int32
    none = dense_drafts(torch.zeros(0, dtype=torch.int32), starts[:1], lengths[1:2], 2)
    assert none.tolist() == [[-1, -1]]


@pytest.mark.parametrize("rule", ["token", "block", "match", "typical"])
def test_a_row_without_drafts_gets_the_token_of_plain_sampling(rule):
    rows = 2 * torch.randn(64, V, generator=torch.Generator().manual_seed(1))
    given = parameters(64, temperature=torch.linspace(0, 2, 64), top_k=torch.arange(64) % 5)
    indptr = torch.arange(65, dtype=torch.int32)
    empty = torch.full((64, 2), -1)
    verified = verify(rows, empty, None, indptr, given, Acceptance(rule))
    assert verified[:, 0].tolist() == sample_rows(rows, given, rule).tolist()
    assert (verified[:, 1:] == -1).all()


def test_logits_with_a_temperature_of_their_own_are_their_softmax():
    generator = torch.Generator().manual_seed(3)
    target, logits = torch.randn(140, V, generator=generator).split([80, 60])
    ids = torch.randint(V, (20, 3), generator=generator)
    own = torch.linspace(0.5, 2, 20)
    q = (logits / own.repeat_interleave(3)[:, None]).softmax(-1)
    ours, reference = (
        verify(target, ids, draft, 4 * torch.arange(21).int(), parameters(20), Acceptance())
        for draft in (scaled_logits(logits.view(20, 3, V), own), probabilities(q, ids.shape))
    )
    assert ours.equal(reference)


def test_seeds_of_a_call_are_drawn_by_the_generators_of_requests_that_have_one():
    def generators():
        return {1: torch.Generator().manual_seed(7), 2: torch.Generator().manual_seed(-3)}

    device = torch.device("cpu")
    drawing = generators()

    def drawn(of):
        return seeds_for(of, 3, device, source=None)

    first, second = drawn(drawing), drawn(drawing)
    assert not (first == second).any()
    assert first[1:].equal(drawn(generators())[1:])


GET = "specdec_vllm: requests that get"
FALLBACK = f"{GET} the token with the largest finite logit, by index in the batch: "
DEVICE = f"{GET} token 0, by index in the batch of an earlier step: "


def test_rows_without_a_distribution_emit_a_token_and_a_warning(logged):
    """It names each request and its faults."""
    rows = torch.zeros(6, V)
    rows[:, 3] = 1.0
    rows[2] = torch.nan
    rows[2, 6] = 2.0
    indptr = 2 * torch.arange(4, dtype=torch.int32)
    given = parameters(3, temperature=torch.tensor([1.0, 1.0, -1.0]))
    tokens = verify(rows, torch.tensor([[3]] * 3), None, indptr, given, Acceptance())
    assert tokens[1:, 0].tolist() == [6, 3]
    assert logged.pop() == FALLBACK + "1 (TARGET_INVALID), 2 (BAD_PARAMETER)"
    assert sample_rows(rows[1:4], parameters(3), "token")[1] == 6
    assert logged == [FALLBACK + "1 (TARGET_INVALID)"]


def test_requests_of_a_device_get_token_0_and_a_warning_in_a_later_step(logged, monkeypatch):
    """Of every fault after which nothing is emitted; the host does not wait, and reads no row."""
    copied = SimpleNamespace(query=lambda: steps > 1)
    monkeypatch.setattr(verification, "on_host", lambda _: False)
    monkeypatch.setattr(faults, "copy_of", lambda status: (copied, status))
    rows, indptr = torch.ones(7, V), torch.tensor([0, 2, 4, 4, 6, 7]).int()
    rows[0], rows[4, 5] = torch.nan, torch.inf
    given = parameters(5, temperature=torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0]))
    for steps in (1, 2):  # noqa: B007
        assert not logged
        drafts = torch.tensor([[3], [3], [-1], [3], [-1]])
        tokens = verify(rows, drafts, None, indptr, given, Acceptance())
        assert tokens[:4, 0].tolist() == [0] * 4
    named = "0 (TARGET_INVALID), 1 (BAD_PARAMETER), 2 (TARGET_INVALID), 3 (TARGET_INVALID)"
    assert logged == [f"{DEVICE}{named}"] * 2
