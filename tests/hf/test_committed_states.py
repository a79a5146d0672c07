"""`CommittedStates` against a loop over tokens."""

import numpy as np
import pytest
import torch
from specdec_hf.cache.committed_states import CommittedStates

LAYERS = (2, 0)
# Of each round: tokens that a forward read before the pending one, rows of its logits, and the rows
# that the tokens of three sequences were chosen from. Sequence 1 ends after the second round.
ROUNDS = (
    (3, 2, [[0, 1], [0, -1], [0, -1]]),
    (0, 4, [[0, 2, 3], [0, 1, -1], [0, 1, 2]]),
    (0, 4, [[0, 3, -1], [-1, -1, -1], [0, -1, -1]]),
    (0, 1, [[0], [-1], [0]]),
)


def forward(number, before, scored):
    """States that tell their round, sequence, column and layer apart."""
    sequences, columns = torch.arange(3)[:, None], torch.arange(before + scored)
    state = 1000.0 * number + 100 * sequences + columns
    return {layer: torch.stack([state, state + 0.1 * layer], dim=-1) for layer in LAYERS}


def expected(b, begin, seen, rounds):
    """The states of one sequence: of the tokens before the pending one, then of its rows."""
    states = []
    for number, (before, scored, rows) in rounds:
        hidden, emitted = forward(number, before, scored), [r for r in rows[b] if r >= 0]
        if number not in seen:
            continue
        prompt = range(before) if emitted else ()
        columns = [c for c in prompt if c >= begin] + [before + r for r in emitted]
        states += [torch.cat([hidden[layer][b, c] for layer in LAYERS]) for c in columns]
    return torch.stack(states) if states else torch.zeros(0, 2 * len(LAYERS))


@pytest.mark.parametrize("seen", [{0, 1, 2, 3}, {1, 2, 3}, {0, 2}], ids=str)
@pytest.mark.parametrize("together", [1, 2, 4])
def test_they_are_the_states_of_what_was_committed(seen, together):
    """A round whose forward was not seen leaves none, and several may be taken at once."""
    known = np.array([0, 2, 3])
    states, lengths = CommittedStates(LAYERS, known), np.array([4, 4, 4])
    for first in range(0, len(ROUNDS), together):
        taken = list(enumerate(ROUNDS))[first : first + together]
        for number, (before, scored, rows) in taken:
            hidden = forward(number, before, scored) if number in seen else {}
            states.record(hidden, lengths, np.array(rows), scored)
            lengths = lengths + (np.array(rows) >= 0).sum(axis=1)
        counts = states.counts
        if not seen & {number for number, _ in taken}:
            assert not counts.any()
            continue
        found, numbers = states.take()
        assert numbers.tolist() == counts.tolist()
        for b in range(3):
            wanted = expected(b, int(known[b]), seen, taken)
            assert torch.equal(found[b, : numbers[b]], wanted)
        assert not states.counts.any()
