"""How many nodes of a drafted tree schedule "optimal" takes, on machines made of formulas."""

from __future__ import annotations

import numpy as np
import pytest
from specdec_hf.schedules.base import ScheduleContext
from specdec_hf.schedules.costs import Costs
from specdec_hf.schedules.optimal import OptimalSchedule

DEPTH, NODES, DRAFT = 5, 32, 0.004
MACHINES = {
    "flat": lambda tokens: 0.03 + 0.0001 * tokens,
    "steep": lambda tokens: 0.03 + 0.004 * tokens,
    # Two tokens cost much more than one, and further ones little.
    "jump": lambda tokens: 0.047 if tokens == 1 else 0.08 + 0.0005 * tokens,
}


def values_of(alpha, rows=1):
    return np.tile(alpha ** np.arange(1, NODES + 1), (rows, 1))


def begin(rows=1, padded=None):
    costs = Costs()
    if padded is not None:
        costs.padded = padded
    schedule = OptimalSchedule()
    schedule.start(ScheduleContext(rows, DEPTH, 100, tree=True, costs=costs))
    return schedule, costs


def rounds(machine, alpha, rows=1, count=12, plain=True):
    """How many nodes each round takes."""
    schedule, costs = begin(rows)
    if plain:
        costs.observe(0, 0, 0.0, machine(rows))
    taken = []
    for _ in range(count):
        taken.append(schedule.nodes(DEPTH, values_of(alpha, rows)))
        draft = DRAFT * (taken[-1] > 0)
        costs.observe(DEPTH * (taken[-1] > 0), taken[-1], draft, machine(rows * (1 + taken[-1])))
    return taken


def best(machine, alpha, rows=1):
    tokens = 1 + np.concatenate([[0.0], values_of(alpha)[0].cumsum()])
    seconds = [DRAFT + machine(rows * (1 + n)) for n in range(NODES + 1)]
    return int((tokens / seconds).argmax()), tokens / seconds


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("alpha", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_nodes_that_are_worth_their_time_are_taken(name, alpha, rows):
    machine = MACHINES[name]
    taken = rounds(machine, alpha, rows)
    number, speeds = best(machine, alpha, rows)
    assert speeds[taken[-1]] > 0.97 * speeds[number], (taken, number)


@pytest.mark.parametrize("nodes", [1, 4, NODES])
def test_one_size_for_all_machines_would_be_found(nodes):
    """Negative control."""
    shares = []
    for machine in MACHINES.values():
        number, speeds = best(machine, 0.9, 4)
        shares.append(speeds[nodes] / speeds[number])
    assert min(shares) < 0.97


@pytest.mark.parametrize("name", MACHINES)
def test_narrower_trees_are_tried_where_no_plain_round_was_seen(name):
    taken = rounds(MACHINES[name], 0.6, plain=False, count=24)
    number, speeds = best(MACHINES[name], 0.6)
    assert speeds[taken[-1]] > 0.9 * speeds[number], (taken, number)


def test_drafts_are_charged_for_padding():
    _, costs = begin(padded=lambda size: -(-size // 8) * 8)
    for nodes, seconds in ((0, 0.03), (7, 0.03), (15, 0.06)):
        costs.observe(nodes, nodes, 0.0, seconds)
    assert costs.round(5) == costs.round(7) == 0.03
    assert costs.round(9) == 0.06


def test_the_first_trees_are_small_in_a_batch():
    """All sequences together get as many tokens as one alone, then at most twice the widest."""
    assert rounds(MACHINES["flat"], 0.9)[0] == NODES
    assert rounds(MACHINES["flat"], 0.9, rows=4, count=3) == [7, 15, 31]
    assert rounds(MACHINES["flat"], 0.9, rows=64)[0] == 1


def test_nodes_that_padding_would_take_are_taken():
    def padded(size):
        return -(-size // 8) * 8

    schedule, costs = begin(padded=padded)
    costs.observe(0, 0, 0.0, 0.03)
    assert costs.plain == 0.03
    for nodes, seconds in ((7, 0.04), (15, 0.06), (31, 0.3)):
        costs.observe(DEPTH, nodes, DRAFT, seconds)
    taken = schedule.nodes(DEPTH, values_of(0.7))
    assert 1 + taken in (8, 16)
