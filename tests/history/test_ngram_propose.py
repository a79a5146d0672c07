"""`ngram_propose` on every short text against the definition, and what its result depends on.

Terms of this folder:
text: the tokens of a sequence, `history[b, :lengths[b]]`.
ending: the last n tokens of a text.
match: an earlier place with the same n tokens.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from proofs import assert_outputs_equal, providers
from proofs.history import ngram_case
from support.providers import SHIM_PROVIDERS, provider, provider_cases

OP = "ngram_propose"
ALL_PROVIDERS = [*providers(OP), *SHIM_PROVIDERS]
# (number of ids, longest text): all texts of the providers that are fast, and of the others.
ALL, FEW = (3, 7), (2, 5)
SETTINGS = [(5, 4, 2), (1, 1, 1), (9, 3, 1), (2, 2, 2), (3, 2**62, 3)]  # gamma, max and min n-gram


def run(name, *args):
    """Run a provider with poisoned allocations."""
    torch.use_deterministic_algorithms(True)
    return provider(OP, name)(*args)


@functools.cache
def texts(ids, longest):
    """(history, lengths) of every text; the columns after a text go on as if it repeated."""
    every = [t for n in range(longest + 1) for t in itertools.product(range(ids), repeat=n)]
    columns = longest + 3
    rows = [(t + (t or (0,)) * columns)[:columns] for t in every]
    return torch.tensor(rows), torch.tensor([len(t) for t in every])


def definition(text, gamma, max_ngram, min_ngram):
    """The draft, from all matches of all sizes; of them the longest, and the latest of these."""
    last = len(text) - 1
    matches = [
        (n, end)
        for n in range(min_ngram, min(max_ngram, last) + 1)
        for end in range(n - 1, last)
        if text[end + 1 - n : end + 1] == text[len(text) - n :]
    ]
    if not matches:
        return []
    copied = text[max(matches)[1] + 1 :]
    return [copied[i % len(copied)] for i in range(gamma)]


@functools.cache
def expected(ids, longest, setting):
    history, lengths = texts(ids, longest)
    drafts = [
        definition(row[:n], *setting)
        for row, n in zip(history.tolist(), lengths.tolist(), strict=True)
    ]
    rest = [-1] * setting[0]
    tokens = torch.tensor([(d + rest)[: setting[0]] for d in drafts])
    return tokens, torch.tensor([len(d) for d in drafts], dtype=torch.int32)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_every_text_gets_the_draft_of_the_definition(name, setting):
    of = FEW if name in SHIM_PROVIDERS else ALL
    assert_outputs_equal(OP, run(name, *texts(*of), *setting), expected(*of, setting))


# Larger texts, and what a result depends on.


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize(("name", "case"), provider_cases(OP))
def test_cases_get_the_drafts_of_the_reference(name, case):
    assert_outputs_equal(OP, run(name, *case.args()), run("reference", *case.args()))


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_a_match_at_either_end_of_a_text_longer_than_a_block(name):
    """A block of the CUDA kernel reads 2048 tokens at once."""
    length = 4200
    history = torch.arange(100, 100 + length).repeat(4, 1)
    history[:, -3:] = torch.tensor([7, 8, 9])
    history[0, :3] = history[0, -3:]  # the first place there is
    history[1, :2] = history[1, -2:]  # two tokens, against three at the end of the first block
    history[1, 1021:1024] = history[1, -3:]
    history[2, -4:] = 9  # the last place there is
    history[3, 1021:1024] = history[3, -3:]  # three tokens, and later two that one thread sees too
    history[3, 2046:2048] = history[3, -2:]
    tokens, counts = run(name, history, torch.full((4,), length), 3, 3, 2)
    assert tokens.tolist() == [[103, 104, 105], [1124, 1125, 1126], [9, 9, 9], [1124, 1125, 1126]]
    assert counts.tolist() == [3] * 4


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_a_length_out_of_range_leaves_its_sequence_without_a_draft(name):
    lengths = torch.tensor([-1, 9, 2**63 - 1, -(2**63), 2**32 + 8, 8])
    tokens, counts = run(name, torch.zeros(6, 8, dtype=torch.int64), lengths, 2, 3, 1)
    assert counts.tolist() == [0, 0, 0, 0, 0, 2]
    assert tokens.tolist() == [[-1, -1]] * 5 + [[0, 0]]


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_nothing_outside_of_the_texts_is_read(name):
    """Neither the columns after a text nor the memory around the view change a bit."""
    history, lengths, *rest = ngram_case(6, 15, 4, ids=2).args()
    wanted = run(name, history, lengths, *rest)
    for around in (0, 1, -7):
        wide = torch.full((8, 23), around)
        view = wide[1:-1, 5:20]
        known = torch.arange(15) < lengths[:, None]
        view.copy_(torch.where(known, history, around))
        before = wide.clone()
        assert_outputs_equal(OP, run(name, view, lengths, *rest), wanted)
        assert torch.equal(wide, before)


@pytest.mark.parametrize("name", [n for n in ALL_PROVIDERS if n != "reference"])
def test_addresses_beyond_2_to_the_31_elements(name):
    """Two rows that lie so far apart; the memory between them is never touched."""
    far = 2**31 + 8
    memory = torch.empty(far + 6, dtype=torch.int32)
    view = memory.as_strided((2, 6), (far, 1))
    view.copy_(torch.tensor([[1, 2, 3, 1, 2, 0], [4, 4, 5, 6, 4, 4]]))
    tokens, _ = provider(OP, name)(view, torch.tensor([5, 6]), 3, 4, 2)
    assert tokens.tolist() == [[3, 1, 2], [5, 6, 4]]
