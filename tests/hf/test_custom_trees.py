"""Tree drafters of the caller: what they may return, and the noise that their rules allow."""

import pytest
import torch
from specdec_hf import Draft, DraftContext, Drafter, PromptLookupDrafter, TrieTree
from support import hf_models

from specdec_kernels import SampledDraft, sample

VOCAB, NEW = 67, 8
TOKENS, PARENTS = torch.tensor([[3, 4, 5]]), torch.tensor([[-1, -1, 0]])
ROWS = SampledDraft(torch.zeros(1, 2, VOCAB), torch.full((1, 2), 4.2), torch.zeros(1, 2), 1.0)


class Proposes(Drafter):
    """Proposes the same in every round."""

    name = "made up"
    size, depth = 3, 2

    def __init__(self, value):
        self.value = value

    def propose(self, history, limits):
        return self.value


def call(drafter, **kwargs):
    return hf_models.decode(hf_models.tiny("llama"), drafter=drafter, max_new_tokens=NEW, **kwargs)


def tree_of(tokens=TOKENS, parents=PARENTS, **more):
    return Draft(tokens, parents, depth=2, **more)


DOUBLE = tree_of(
    TOKENS[:, :2], PARENTS[:, :2], distribution=ROWS._replace(logits=ROWS.logits.double())
)
OTHER_ROWS = torch.zeros(1, 2, dtype=torch.int32)
NODES = tree_of(TOKENS.repeat(1, 2), PARENTS.repeat(1, 2))
WRONG = {
    "a string": ("1", TypeError, "its tokens as a tensor, array or list, got str"),
    "too many nodes": (NODES, ValueError, "at most size=3 nodes, got 6"),
    "float tokens": (tree_of(TOKENS * 1.0), TypeError, "tokens as a tensor of integers, got to"),
    "flat tokens": (tree_of(TOKENS[0]), ValueError, r"tokens \[1, N\], got \[3\]"),
    "listed parents": (tree_of(parents=[[-1]]), TypeError, "parents as a tensor of integers"),
    "few parents": (tree_of(parents=PARENTS[:, :2]), ValueError, r"parents \[1, 3\], got \[1, 2"),
    "parents elsewhere": (
        tree_of(parents=PARENTS.to("meta")), ValueError, "on the host or on the target's device cpu"
    ),
    "integer scores": (tree_of(scores=TOKENS), TypeError, "scores as a tensor of floats, got torc"),
    "misshapen draft_rows": (
        tree_of(distribution=ROWS, draft_rows=OTHER_ROWS), ValueError, r"draft_rows \[1, 3\], got"
    ),
    "float carried": (tree_of(carried=torch.zeros(1, 2)), TypeError, "carried as a tensor of inte"),
    "float64 logits": (DOUBLE, TypeError, "distribution.logits of at most 32 bits, got float64"),
    "a tensor as distribution": (
        tree_of(distribution=ROWS.logits), TypeError, "that is None or a SampledDraft, got Tensor"
    ),
}  # fmt: skip


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("merged", [False, True], ids=["alone", "merged"])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_tree_is_refused_with_the_name_of_the_drafter(case, merged):
    value, error, message = WRONG[case]
    tree = {"tree": TrieTree(depth=2)} if merged else {}
    drafter = [Proposes(value)] if merged else Proposes(value)
    with pytest.raises(error, match=rf"^Proposes\.propose.*{message}"):
        call(drafter, **tree)


@pytest.mark.parametrize(
    ("rows", "draft_rows"),
    [(ROWS, None), (ROWS._replace(threshold=torch.zeros(1, 1)), torch.zeros_like(TOKENS)),
     (ROWS._replace(logits=torch.zeros(VOCAB)), torch.zeros_like(TOKENS))],
    ids=["rows for two of three nodes", "one threshold for two rows", "one row without a batch"],
)  # fmt: skip
def test_a_misshapen_distribution_leaves_a_note_and_no_drafts(rows, draft_rows):
    got = call(Proposes(tree_of(distribution=rows, draft_rows=draft_rows)))
    assert got.sequences.tolist() == call(None).sequences.tolist()
    [note] = got.stats.notes
    assert note.startswith("round 2: drafter made up (Proposes) gave a distribution that is not [B")


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("depth", [None, 1, 2, 9])
@pytest.mark.parametrize("tree", [None, TrieTree(depth=2)], ids=["alone", "merged"])
def test_integers_of_a_tree_may_be_of_any_type_and_its_depth_is_a_bound(tree, depth):
    """A tree that is said to be less deep than it is loses drafts and no text."""
    tokens, parents = TOKENS.to(torch.int16), PARENTS.to(torch.int16)
    for size in (3, 0):  # a tree without nodes is a round without drafts
        made = Draft(tokens[:, :size], parents[:, :size], depth=depth)
        drafter = Proposes(made) if tree is None else [Proposes(made)]
        assert call(drafter, tree=tree).sequences.tolist() == call(None).sequences.tolist()


class Drawn(Drafter):
    """Two children of the root, drawn from one row at the positions that a function gives."""

    rules = ("multi_draft", "target_only")
    size, depth = 2, 1

    def __init__(self, positions, noise="context"):
        self.positions, self.noise = positions, noise

    def start(self, context: DraftContext):
        self.context = context

    def propose(self, history, limits):
        rows = torch.zeros(2, VOCAB)
        seeds = self.context.seeds.repeat_interleave(2)
        positions = self.positions(self.context, history.lengths)
        drawn = sample(rows, seeds=seeds, positions=positions.flatten())
        rows, sums, thresholds = rows[None], drawn.logsumexp[None], drawn.threshold[None]
        distribution = SampledDraft(rows, sums, thresholds, 1.0)
        return Draft(drawn.tokens[None], torch.full((1, 2), -1), distribution, depth=1)


def of_the_round(context, lengths):
    return context.noise_positions(lengths, [0, 1], depth=1)


def of_the_position(context, lengths):
    return torch.from_numpy(lengths.copy()).repeat(2)


SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 3}


def test_noise_of_positions_is_refused_in_trees_too():
    with pytest.raises(ValueError, match=r"Drawn\.propose must draw at positions from context"):
        call(Drawn(of_the_position), rule="multi_draft", **SAMPLED)
    assert call(Drawn(of_the_round), rule="multi_draft", **SAMPLED).stats.drafted > 0
    own = Drawn(of_the_position, noise="independent")
    assert call(own, rule="multi_draft", **SAMPLED).stats.drafted > 0
    # Where nothing is compared with the distribution, any noise serves.
    assert call(Drawn(of_the_position), rule="target_only", **SAMPLED).stats.drafted > 0


class Several(PromptLookupDrafter):
    """Proposes the same chains in every round."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def propose(self, history, limits):
        return self.value


TOO_MANY = r"up to 2 proposals of up to 2 tokens for each of 1 sequences, got tokens"
SEVERAL = {
    "list": ([[1, 2]], 2, TypeError, "tokens as a tensor of integers, got list"),
    "floats": (torch.ones(1, 2), 2, TypeError, "tokens as a tensor of integers, got torch.float32"),
    "odd": (TOKENS, 2, ValueError, rf"{TOO_MANY} \[1, 3\] with num_proposals=2"),
    "3-D": (TOKENS[None], 2, ValueError, rf"{TOO_MANY} \[1, 1, 3\] with num_proposals=2"),
    "too long": (TOKENS.repeat(1, 2), 2, ValueError, rf"{TOO_MANY} \[1, 6\] with num_proposals=2"),
    "too many": (TOKENS, 3, ValueError, rf"{TOO_MANY} \[1, 3\] with num_proposals=3"),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_several_proposals_are_checked_too(case):
    value, count, error, message = SEVERAL[case]
    with pytest.raises(error, match=rf"^Several\.propose must return {message}"):
        call(Several(Draft(value, num_proposals=count)), tree=TrieTree(sequences=2, depth=2))


def test_proposals_that_nobody_asked_for_are_refused():
    two = Draft(TOKENS[:, :2], num_proposals=2)
    with pytest.raises(ValueError, match=r"^Several\.propose must return up to 1 proposals"):
        call(Several(two))


def test_a_chain_of_a_drafter_of_trees_is_a_tree_with_one_path():
    chain = call(Proposes([[3]]))
    assert chain.sequences.tolist() == call(None).sequences.tolist()
    assert chain.stats.drafted > 0
    right = call(None).sequences[0]

    class Right(Proposes):
        def propose(self, history, limits):
            length = int(history.lengths[0])
            return [right[length : length + int(limits[0])].tolist()]

    got = call(Right(None))
    assert got.sequences[0].tolist() == right.tolist()
    assert got.stats.accepted == got.stats.drafted > 3


def test_parents_need_a_drafter_that_says_how_large_its_trees_are():
    class Sizeless(Proposes):
        size, depth = 0, 0

    with pytest.raises(ValueError, match=r"^Sizeless\.propose must return a chain"):
        call(Sizeless(tree_of()))
