"""Nodes of trees: whose drafts get those of a merged one, and how many are worth their time."""

import numpy as np
import pytest
import torch
from specdec_hf import Draft, StatelessDrafter, TrieTree
from specdec_hf.drafters.merge import agreement
from specdec_hf.drafters.node_budget import NodeBudget, Nodes
from specdec_hf.schedules.base import ScheduleContext
from specdec_hf.schedules.costs import Costs
from specdec_hf.schedules.optimal import OptimalSchedule
from support import hf_models

RAGGED = (9, 5, 12)
NEW = 24


def test_agreement_counts_the_common_beginning():
    chains = np.array([[[1, 2, 3], [1, 9, 3], [-1, -1, -1], [7, 1, 2]]])
    assert agreement(chains, np.array([[1, 2, 4]])).tolist() == [[2, 1, 0, 0]]
    assert agreement(chains, np.array([[1, 2, 3]])).tolist() == [[3, 1, 0, 0]]
    assert agreement(chains, np.array([[1]])).tolist() == [[1, 1, 0, 0]]
    assert agreement(chains, np.array([[-1, -1]])).tolist() == [[0, 0, 0, 0]]


def test_only_tokens_whose_prefix_was_committed_are_measured():
    budget = NodeBudget([0, 1], batch_size=1)
    before = budget.acceptance()
    budget.observe(np.array([[[1, 2, 3], [4, 5, -1]]]), np.array([[0, 1]]))
    after = budget.acceptance()
    assert np.sign(after - before)[0, :, :3].tolist() == [[-1, 0, 0], [1, -1, 0]]


class Known(StatelessDrafter):
    def __init__(self, texts, shift=0):
        self.texts, self.shift = texts, shift
        self.accepted = 0

    def propose(self, history, limits):
        gamma = int(limits.max())
        return [
            ((text[n : n + gamma] + self.shift) % hf_models.VOCAB).tolist()
            for text, n in zip(self.texts, history.lengths, strict=True)
        ]

    def commit(self, texts, done):
        self.accepted += int(done.accepted.sum())


class KnownTree(StatelessDrafter):
    """The same as a tree of its own: a wrong child of the root, and the known text."""

    name = "known_tree"
    size, depth = 4, 3

    def __init__(self, texts):
        self.texts = texts
        self.paths = []

    def propose(self, history, limits):
        tokens = np.full((len(limits), 4), -1)
        for b, (text, n) in enumerate(zip(self.texts, history.lengths, strict=True)):
            right = text[n : n + min(3, limits[b])]
            if len(right):
                tokens[b, 0] = (right[0] + 1) % hf_models.VOCAB
                tokens[b, 1 : 1 + len(right)] = right
        parents = torch.tensor([-1, -1, 1, 2]).expand(len(limits), -1)
        carried = torch.tensor(tokens[:, :1])
        return Draft(torch.from_numpy(tokens), parents, depth=3, carried=carried)

    def commit(self, texts, done):
        self.paths.append(done.path.copy())
        assert ((done.tokens >= 0) == (done.path >= 0)).all()
        assert ((done.path >= 0).sum(axis=1) == done.accepted).all()
        assert done.carried.shape in ((len(done.lengths), 0), (len(done.lengths), 1))


@pytest.fixture(scope="module")
def known():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    plain = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    texts = [
        row[mask.argmax() :].numpy()
        for row, mask in zip(plain, inputs["attention_mask"], strict=True)
    ]
    return model, plain, texts


def run(model, **settings):
    return hf_models.decode(model, RAGGED, **{"max_new_tokens": NEW, **settings})


@pytest.mark.parametrize("measures", [True, False])
def test_the_budget_goes_to_the_better_drafter(known, measures, monkeypatch):
    model, plain, texts = known
    good, bad = Known(texts), Known(texts, shift=1)
    if not measures:  # negative control
        monkeypatch.setattr(NodeBudget, "observe", lambda *_: None)
    out = run(model, drafter=[bad, good], tree=TrieTree(depth=4, size=5))
    assert torch.equal(out.sequences, plain)
    assert bad.accepted == 0
    assert (out.stats.mean_acceptance_length > 3.3) == measures
    assert max(out.stats.gammas) <= 5


def test_trees_and_chains_become_one_tree(known):
    model, plain, texts = known
    tree = KnownTree(texts)
    out = run(model, drafter=[tree, "prompt_lookup"], tree=TrieTree(2, 3))
    assert torch.equal(out.sequences, plain)
    assert out.stats.mean_acceptance_length > 3
    paths = np.concatenate([path[:, :3] for path in tree.paths if path.shape[1] >= 3])
    assert (paths == [1, 2, 3]).all(axis=1).mean() > 0.5
    out = run(model, drafter=KnownTree(texts))
    assert torch.equal(out.sequences, plain)
    assert out.stats.drafter == "known_tree"


class OneNode(KnownTree):
    size, depth = 1, 1

    def propose(self, history, limits):
        made = super().propose(history, limits)
        return Draft(made.tokens[:, 1:2], made.parents[:, :1], depth=1)


def test_a_tree_of_one_node_becomes_a_part_of_another(known):
    model, plain, texts = known
    out = run(model, drafter=[OneNode(texts)], tree=TrieTree())
    assert torch.equal(out.sequences, plain)
    assert out.stats.accepted == out.stats.drafted > 20


def test_a_merged_tree_is_on_the_host_and_without_a_distribution(known):
    model, _, texts = known

    class Elsewhere(KnownTree):
        def propose(self, history, limits):
            made = super().propose(history, limits)
            return Draft(made.tokens.to("meta"), made.parents)

    with pytest.raises(ValueError, match=r"Elsewhere\.propose must return tokens on the host"):
        run(model, drafter=[Elsewhere(texts)], tree=TrieTree())


def test_drawn_tokens_are_never_left_out_for_their_value():
    """What is kept of drawn chains depends on their lengths alone."""
    rng, budget = np.random.default_rng(2), NodeBudget([0, 0], 1)
    budget.observe(np.zeros((1, 2, 3), dtype=np.int64), np.array([[2, 1]]))
    drawn = [rng.integers(0, 2, (1, 2, 3)) for _ in range(50)]
    assert len({(budget.cut(chains, 3) >= 0).tobytes() for chains in drawn}) == 1
    # Negative control: chains that share nodes are kept by their tokens.
    assert len({(kept(budget, chains, 3) >= 0).tobytes() for chains in drawn}) > 1
    short = np.array([[[1, -1, 3], [2, 2, 2]]])  # what follows the end of a chain is none of it
    assert budget.cut(short, 9).tolist() == [[[1, -1, -1], [2, 2, 2]]]


def kept(budget, chains, size, values=None, **options):
    """Chains of one sequence, -1 where a token is none of the nodes that a merged tree keeps."""
    tree, values = Nodes(), budget.worth(chains.shape[2]) if values is None else values
    rows = zip(chains[0].tolist(), values[0].tolist(), strict=True)
    paths = [tree.add_chain(*row, first=False) for row in rows]
    (numbers,) = budget.choose([tree], size, **options)
    return np.where(np.isin(paths, numbers), chains[0], -1)


def test_a_tree_keeps_the_most_valuable_prefixes_of_random_chains():
    """Drawn drafts are not chosen by their probability, which would bias the text."""
    rng = np.random.default_rng(4)
    for size in range(1, 9):
        chains, least = rng.integers(0, 3, (1, 3, 4)), rng.choice([0.0, 0.2])
        values = rng.random((1, 3, 4)).cumprod(axis=2)
        budget, best = NodeBudget([0, 1, 2], 1), {}
        rows = [[tuple(chain[: d + 1]) for d in range(4)] for chain in chains[0].tolist()]
        for prefix, value in zip([p for r in rows for p in r], values.flatten(), strict=True):
            best[prefix] = max(best.get(prefix, 0.0), value)
        falling = sorted((p for p in best if best[p] >= least), key=best.get, reverse=True)
        want = [[p in falling[:size] for p in row] for row in rows]
        got = kept(budget, chains, size, values, min_probability=least)
        assert got.tolist() == np.where(want, chains[0], -1).tolist()


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


def test_one_size_for_all_machines_would_be_found():
    for nodes in (1, 4, NODES):
        found = (best(machine, 0.9, 4) for machine in MACHINES.values())
        assert min(speeds[nodes] / speeds[number] for number, speeds in found) < 0.97


def test_no_node_is_kept_without_its_parent():
    for worth in ([0.1, 0.9], [np.nan, 0.9]):
        tree = Nodes()
        tree.add_tree([5, 6], [-1, 0], worth)
        assert NodeBudget([0], 1).choose([tree], 1) == [[0]]
