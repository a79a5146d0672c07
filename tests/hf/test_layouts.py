"""Layouts of trees: shapes, refusals, Sequoia's best tree of a size, and trees that grow."""

import random

import pytest
import torch
from specdec_hf import EagleTree, TreeSpec, generate, load_acceptance, save_acceptance
from specdec_hf.drafters.growing_tree import GrowingTreeState
from specdec_hf.drafters.model import DraftModel
from support import hf_models


def all_trees(size):
    trees = [()]
    for n in range(size):
        trees = [(*t, p) for t in trees for p in range(t[-1] if t else -1, n)]
    return [TreeSpec(t) for t in trees]


def expected_length(spec, acceptance):
    """Expected accepted nodes, by recursion: the children of each node are tried in turn."""

    def from_node(node):
        total, missed = 0.0, 1.0
        for k, child in enumerate(n for n, p in enumerate(spec.parents) if p == node):
            p = acceptance[k] if k < len(acceptance) else 0.0
            total += missed * p * (1 + from_node(child))
            missed *= 1 - p
        return total

    return from_node(-1)


def test_shapes_follow_their_definition():
    assert TreeSpec.chain(3).parents == (-1, 0, 1)
    tree = TreeSpec.branching((3, 2, 1))
    assert (tree.size, tree.depth, tree.leaves) == (15, 3, 6)
    assert tree.ranks == (0, 1, 2, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0)
    assert tree.depths == (1,) * 3 + (2,) * 6 + (3,) * 6
    assert tree.cut(2) == TreeSpec.branching((3, 2))
    assert tree.cut(9) is tree
    assert TreeSpec((-1, -1), (1, 4)).ranks == (1, 4)
    assert hash(tree) == hash(TreeSpec.branching((3, 2, 1)))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_sequoia_is_the_best_tree(size):
    rnd = random.Random(size)
    trees = all_trees(size)
    for _ in range(6):
        acceptance = [rnd.choice([0.0, rnd.random(), rnd.random() ** 3]) for _ in range(4)]
        lengths = {tree: expected_length(tree, acceptance) for tree in trees}
        for depth, branching in [(None, None), (2, None), (None, 2), (3, 2)]:
            made = TreeSpec.sequoia(acceptance, size, depth, branching)
            assert made.size <= size
            assert made.depth <= (depth or size)
            assert max(made.ranks) < (branching or 4)
            best = max(
                length
                for tree, length in lengths.items()
                if tree.depth <= (depth or size) and max(tree.ranks) < (branching or size)
            )
            assert expected_length(made, acceptance) == pytest.approx(best, abs=1e-12)


def test_medusa_keeps_the_most_accurate_paths():
    assert TreeSpec.medusa((3, 2)) == TreeSpec.branching((3, 2))
    table = [[0.6, 0.3, 0.1], [0.5, 0.2]]
    made = TreeSpec.medusa((3, 2), 5, table)
    # 0.6, 0.3, 0.6 * 0.5, 0.3 * 0.5, and 0.6 * 0.2 before 0.1.
    assert made.parents == (-1, -1, 0, 0, 1)


def test_acceptance_files_round_trip_or_name_their_fault(tmp_path):
    path = tmp_path / "acceptance.json"
    save_acceptance(path, [0.5, 0.25])
    assert load_acceptance(path) == [0.5, 0.25]
    with pytest.raises(ValueError, match=r"acceptance\[0\] must be a number in \[0, 1\], got -1"):
        save_acceptance(path, [-1])
    for text, message in (
        ("{", "cannot read acceptance file"),
        ("[0.5]", 'needs "acceptance", a list of probabilities'),
        ('{"acceptance": [2]}', r"acceptance.json: acceptance\[0\] must be a number in"),
        ('{"acceptance": ["x"]}', r"acceptance\[0\] must be a number in \[0, 1\], got 'x'"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_acceptance(path)


LAYOUT = EagleTree(width=3, depth=6, size=5)
MIN_PROBABILITY = 0.1  # of the probability of two paths


@pytest.fixture(scope="module")
def models():
    target = hf_models.build("llama")
    return target, hf_models.with_noise(target, 0.02)


def drafted(models, inputs, monkeypatch, layout=LAYOUT):
    """The text, the proposed trees, and how many levels were fed to the draft model."""
    target, draft = models
    trees, fed = [], []
    propose, feed = GrowingTreeState.propose, DraftModel.feed

    def recorded(self, texts, limits):
        trees.append(propose(self, texts, limits))
        return trees[-1]

    def counted(self, *args):
        fed.append(1)
        return feed(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(GrowingTreeState, "propose", recorded)
        patch.setattr(DraftModel, "feed", counted)
        text = generate(target, **inputs, drafter=draft, tree=layout,
                        max_new_tokens=16, do_sample=False, guard=False)  # fmt: skip
    return text, [(x.tokens.tolist(), x.parents.tolist()) for x in trees if x is not None], len(fed)


@pytest.mark.parametrize("lengths", [(9,), (9, 4, 12)], ids=["one", "ragged"])
def test_the_trees_are_those_of_all_levels_in_fewer_steps(lengths, models, monkeypatch):
    inputs = hf_models.prompts(lengths)
    text, trees, fed = drafted(models, inputs, monkeypatch)
    monkeypatch.setattr(GrowingTreeState, "_continues", lambda *_: None)
    all_text, all_trees, all_fed = drafted(models, inputs, monkeypatch)
    assert torch.equal(text, all_text)
    assert trees == all_trees
    assert fed < all_fed


def own_trees(trees, row):
    own = [zip(tokens[row], parents[row], strict=True) for tokens, parents in trees]
    present = [[(token, parent) for token, parent in nodes if token >= 0] for nodes in own]
    return [nodes for nodes in present if nodes]


@pytest.mark.parametrize("decided", ["alone", "together"])
def test_a_sequence_has_the_same_trees_alone_and_in_a_batch(decided, models, monkeypatch):
    """Where another sequence of the batch goes on to a deeper level, too."""
    layout = EagleTree(width=2, depth=5, size=14, min_probability=MIN_PROBABILITY)
    if decided == "together":  # negative control: all go on where one does
        continue_drafting = GrowingTreeState._continues
        monkeypatch.setattr(
            GrowingTreeState, "_continues",
            lambda *args: (mine := continue_drafting(*args)) | mine.any(),
        )  # fmt: skip
    inputs = hf_models.prompts((9, 4, 12))
    _, trees, _ = drafted(models, inputs, monkeypatch, layout)
    equal = []
    for row, mask in enumerate(inputs["attention_mask"]):
        own = {name: x[row : row + 1, mask.argmax() :] for name, x in inputs.items()}
        _, alone, _ = drafted(models, own, monkeypatch, layout)
        equal.append(own_trees(trees, row) == own_trees(alone, 0))
    assert all(equal) == (decided == "alone")
    assert len({len(tree) for tree in own_trees(trees, 0)}) > 1  # some go on and some do not
