"""Drafters of the caller, of chains and trees: what they may return, are told, and cannot harm."""

import gc

import numpy as np
import pytest
import torch
from specdec_hf import Draft, Drafter, PromptLookupDrafter, SpeculativeDecoder, TrieTree
from support import hf_models
from support.hf_models import NEW, RAGGED, SAMPLED, run

from specdec_kernels import SampledDraft

TREES = pytest.mark.parametrize("tree", [None, TrieTree(depth=5)], ids=["chain", "trie"])


class Proposes(Drafter):
    name = "made up"

    def __init__(self, function, size=0, depth=0):
        self.function, self.size, self.depth = function, size, depth

    def start(self, context):
        self.context = context

    def propose(self, history, limits):
        self.context.noise_positions(history.lengths, 0)  # in vain
        return self.function(history, int(limits.max()))


def always(value):
    """Proposes the same, and nothing where the round takes no two tokens."""
    return Proposes(lambda history, gamma: value if gamma > 1 else None)


def plain_text(lengths=RAGGED):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(lengths)
    return model, inputs, model.generate(**inputs, max_new_tokens=NEW, do_sample=False).tolist()


def write_arrays(history, gamma):
    for array in (history.tokens, history.lengths, history.active):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 1
    history.last(2)[:] = 3


def write_tensors(history, gamma):
    for array in (history.tokens, history.lengths, history.active):
        torch.from_numpy(array).zero_()


def replace_arrays(history, gamma):
    for name in ("tokens", "lengths", "active"):
        with pytest.raises(AttributeError, match=name):
            setattr(history, name, None)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.covering(test=1)
@TREES
@pytest.mark.parametrize("write", [write_arrays, write_tensors, replace_arrays])
def test_a_drafter_cannot_write_to_the_history(write, tree):
    model, inputs, expected = plain_text()
    assert run(model, inputs, drafter=Proposes(write), tree=tree).sequences.tolist() == expected


@TREES
def test_a_drafter_cannot_write_to_seeds_parameters_or_lengths(tree):
    model, inputs, _ = plain_text()

    class Writes(Drafter):
        def start(self, context):
            context.seeds.zero_()
            context.temperature.fill_(0.1)

        def propose(self, history, limits):
            return np.full((len(RAGGED), int(limits.max())), 1)

        def commit(self, outcome):
            assert (outcome.lengths > 0).all()
            outcome.lengths[:] = outcome.accepted[:] = -7

    kwargs = {**SAMPLED, "temperature": [0.7] * 3, "rule": "match"}
    plain = run(model, inputs, **kwargs)
    drafters = Writes() if tree is None else [Writes(), Writes()]
    got = run(model, inputs, drafter=drafters, tree=tree, **kwargs)
    assert got.sequences.tolist() == plain.sequences.tolist()
    assert min(min(record.accepted) for record in got.stats.round_log) >= 0


FORMS = {
    "tensor": torch.tensor,
    "uint8 array": lambda rows: np.array(rows, dtype=np.uint8),
    "lists": lambda rows: rows,
    "list of tensors": lambda rows: [torch.tensor(row) for row in rows],
    "draft of lists": Draft,
    "counts in a tensor": lambda rows: Draft(
        rows, counts=torch.tensor([len(row) for row in rows], dtype=torch.int32)
    ),
}


@pytest.mark.covering(test=1)
@TREES
@pytest.mark.parametrize("form", FORMS)
def test_tokens_may_be_a_tensor_an_array_or_lists(form, tree):
    """The drafts are right, so a form that is misread accepts fewer of them."""
    model, inputs, expected = plain_text()

    def foresee(history, gamma):
        rows = []
        for text, length, padding in zip(expected, history.lengths, padded, strict=True):
            ahead = text[padding + length :][:gamma]
            assert history.tokens[len(rows), :length].tolist() == text[padding:][:length]
            rows.append(ahead + [0] * (gamma - len(ahead)))
        return FORMS[form](rows)

    padded = [max(RAGGED) - length for length in RAGGED]
    got = run(model, inputs, drafter=Proposes(foresee), tree=tree)
    assert got.sequences.tolist() == expected
    assert got.stats.mean_acceptance_length == NEW / 5  # with the round that reads the prompt
    assert got.stats.notes == []


def rows(**other):
    zeros = SampledDraft(torch.zeros(1, 2, 67), torch.zeros(1, 2), torch.zeros(1, 2), 1.0)
    return Draft([[1, 2]], distribution=zeros._replace(**other))


WRONG = {  # what propose returns for one sequence and gamma = 5, and the message
    "a number": (3, TypeError, "None, a Draft, or its tokens as a tensor, array or list, got int"),
    "bool tensor": (torch.ones(1, 2) > 0, TypeError, "tokens of an integer type, got torch.bool"),
    "flat list": ([1], TypeError, r"tokens\[0\] must be a sequence, got 1"),
    "too many": (torch.ones(1, 6, dtype=int), ValueError, r"tokens \[1, 0..5\], got \[1, 6\]"),
    "two lists": ([[1], [1]], ValueError, r"tokens \[1, 0..5\], got 2 lists"),
    "meta": (torch.ones(1, 2, dtype=int, device="meta"), ValueError, "stores them, got meta"),
    "float counts": (Draft([[1]], counts=[1.0]), TypeError, "counts as integers .* got float64"),
    "tensor as distribution": (
        Draft([[1, 2]], distribution=torch.zeros(1, 2, 67)),
        TypeError,
        "distribution that is None or a SampledDraft, got Tensor",
    ),
    "sums elsewhere": (
        rows(logsumexp=torch.zeros(1, 2, device="meta")),
        ValueError,
        "distribution.logsumexp on the target's device cpu, got meta",
    ),
}


@pytest.mark.covering(test=1)
@TREES
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_draft_is_refused_with_the_name_of_the_drafter(case, tree):
    value, error, message = WRONG[case]
    with pytest.raises(error, match=rf"^Proposes\.propose.*{message}"):
        run(hf_models.tiny("llama"), hf_models.prompts((9,)), drafter=always(value), tree=tree)


NAN = torch.full((3, 2, 67), torch.nan)
NOTED = {  # what propose returns for RAGGED, and the note
    "huge ids": ([[10**30, 1]] * 3, "drafted ids outside the vocabulary"),
    "negative counts": (Draft([[1, 2]] * 3, counts=[-1, 2, 2]), "counts outside [0, gamma]"),
    "misshapen counts": (Draft([[1, 2]] * 3, counts=[2, 2]), "counts that are not [B]"),
    "misshapen distribution": (
        Draft(
            [[1, 2]] * 3, distribution=SampledDraft(NAN[:, :1], NAN[:, :1, 0], NAN[:, :1, 0], 1.0)
        ),
        "gave a distribution that is not [B, gamma, V]",
    ),
}
SAME_TEXT = {None: "match", TrieTree(depth=5): "target_only"}  # rules that ignore the drafts


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("tree", SAME_TEXT, ids=["chain", "trie"])
@pytest.mark.parametrize("case", NOTED)
def test_a_draft_that_cannot_be_accepted_leaves_a_note(case, tree):
    value, message = NOTED[case]
    model, inputs, _ = plain_text()
    kwargs = {**SAMPLED, "max_new_tokens": 6}
    plain = run(model, inputs, rule="match" if tree is None else "token", **kwargs)
    got = run(model, inputs, drafter=always(value), tree=tree, rule=SAME_TEXT[tree], **kwargs)
    assert got.sequences.tolist() == plain.sequences.tolist()
    [note] = got.stats.notes
    assert note.startswith("round 2: drafter made up (Proposes) ")  # the first that drafts
    assert message in note


def test_a_distribution_that_is_not_finite_leaves_a_note():
    model, inputs, _ = plain_text()
    broken = always(
        Draft([[1, 2]] * 3, distribution=SampledDraft(NAN, NAN[..., 0], NAN[..., 0], 1.0))
    )
    got = run(model, inputs, drafter=broken, rule="token", **SAMPLED)
    [note] = got.stats.notes
    assert note.startswith("round 2: drafter made up (Proposes) gave a distribution that is not f")
    assert got.stats.accepted == 0


def test_ids_that_only_the_verification_sees_leave_a_note(monkeypatch):
    """The host does not look at drafts that lie on a device."""
    model, inputs, expected = plain_text()

    def unread(drafter, proposed, history, gamma, context):
        return Draft(torch.full((3, 1), 10**6), counts=np.ones(3, dtype=np.int64))

    monkeypatch.setattr("specdec_hf.drafting.checks.read_chain", unread)
    got = run(model, inputs, drafter=always([[1]] * 3))
    assert got.sequences.tolist() == expected
    assert got.stats.notes == [
        "round 2: drafter made up (Proposes) drafted ids outside the vocabulary; "
        "those drafts count as absent"
    ]


@TREES
def test_a_drafter_in_use_is_refused_and_free_again_afterwards(tree):
    model, inputs, expected = plain_text((9,))
    drafter = PromptLookupDrafter()
    decoder = SpeculativeDecoder(drafter, tree=tree)

    def works():
        got = run(model, inputs, drafter=drafter, tree=tree, max_new_tokens=8)
        assert got.sequences.tolist() == [text[: 9 + 8] for text in expected]

    for end in ("closed", "abandoned"):
        stream = decoder.stream(model, **inputs, max_new_tokens=8, do_sample=False)
        works()  # the stream has not begun
        next(stream)
        with pytest.raises(RuntimeError, match="one call at a time, got a PromptLookupDrafter tha"):
            run(model, inputs, drafter=drafter, tree=tree)
        if end == "closed":
            stream.close()
        del stream
        gc.collect()
        works()
    with pytest.raises(ValueError, match="an object once, got one PromptLookupDrafter t"):
        run(model, inputs, drafter=[drafter, drafter], tree=TrieTree())
    works()


@pytest.mark.parametrize("field", ["carried", "draft_rows", "scores"])
def test_a_chain_with_what_it_cannot_have_is_refused(field):
    dtype = {"carried": torch.int64, "draft_rows": torch.int32}.get(field, torch.float32)
    count = 1 if field == "carried" else len(RAGGED)  # that chains carry something is allowed
    draft = Draft([[1]] * len(RAGGED), **{field: torch.zeros(count, 1, dtype=dtype)})
    with pytest.raises(ValueError, match=f"Proposes.propose must return {field} "):
        run(*plain_text()[:2], drafter=Proposes(lambda history, gamma: draft))


def test_the_store_of_committed_tokens_grows_with_the_text(monkeypatch):
    monkeypatch.setattr("specdec_hf.loop.begin.SLOTS_AHEAD", 2)
    model, inputs, expected = plain_text()
    shapes = set()

    def copies(history, gamma):
        shapes.add(history.tokens.shape[1])
        return history.last(4)[:, :gamma]

    assert run(model, inputs, drafter=Proposes(copies)).sequences.tolist() == expected
    assert len(shapes) > 1


TOKENS, PARENTS = torch.tensor([[3, 4, 5]]), torch.tensor([[-1, -1, 0]])
ROWS = SampledDraft(
    torch.zeros(1, 2, hf_models.VOCAB), torch.full((1, 2), 4.2), torch.zeros(1, 2), 1.0
)


def in_trees(value):
    return Proposes(lambda history, gamma: value, 3, 2)


def call(drafter, **kwargs):
    return hf_models.decode(hf_models.tiny("llama"), drafter=drafter, max_new_tokens=8, **kwargs)


def tree_of(tokens=TOKENS, parents=PARENTS, **more):
    return Draft(tokens, parents, depth=2, **more)


DOUBLE = tree_of(
    TOKENS[:, :2], PARENTS[:, :2], distribution=ROWS._replace(logits=ROWS.logits.double())
)
OTHER_ROWS = torch.zeros(1, 2, dtype=torch.int32)
NODES = tree_of(TOKENS.repeat(1, 2), PARENTS.repeat(1, 2))
WRONG_TREES = {
    "too many nodes": (NODES, ValueError, "at most size=3 nodes, got 6"),
    "float tokens": (tree_of(TOKENS * 1.0), TypeError, "tokens as a tensor of integers, got to"),
    "listed parents": (tree_of(parents=[[-1]]), TypeError, "parents as a tensor of integers"),
    "few parents": (tree_of(parents=PARENTS[:, :2]), ValueError, r"parents \[1, 3\], got \[1, 2"),
    "parents elsewhere": (
        tree_of(parents=PARENTS.to("meta")), ValueError, "on the host or on the target's device cpu"
    ),
    "misshapen draft_rows": (
        tree_of(distribution=ROWS, draft_rows=OTHER_ROWS), ValueError, r"draft_rows \[1, 3\], got"
    ),
    "float64 logits": (DOUBLE, TypeError, "distribution.logits of at most 32 bits, got float64"),
}  # fmt: skip


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("merged", [False, True], ids=["alone", "merged"])
@pytest.mark.parametrize("case", WRONG_TREES)
def test_a_wrong_tree_is_refused_with_the_name_of_the_drafter(case, merged):
    value, error, message = WRONG_TREES[case]
    tree = {"tree": TrieTree(depth=2)} if merged else {}
    drafter = [in_trees(value)] if merged else in_trees(value)
    with pytest.raises(error, match=rf"^Proposes\.propose.*{message}"):
        call(drafter, **tree)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("depth", [None, 1, 2, 9])
@pytest.mark.parametrize("tree", [None, TrieTree(depth=2)], ids=["alone", "merged"])
def test_integers_of_a_tree_may_be_of_any_type_and_its_depth_is_a_bound(tree, depth):
    """A tree that is said to be less deep than it is loses drafts and no text."""
    tokens, parents = TOKENS.to(torch.int16), PARENTS.to(torch.int16)
    for size in (3, 0):  # a tree without nodes is a round without drafts
        made = Draft(tokens[:, :size], parents[:, :size], depth=depth)
        drafter = in_trees(made) if tree is None else [in_trees(made)]
        assert call(drafter, tree=tree).sequences.tolist() == call(None).sequences.tolist()


def test_a_chain_of_a_drafter_of_trees_is_a_tree_with_one_path():
    chain = call(in_trees([[3]]))
    assert chain.sequences.tolist() == call(None).sequences.tolist()
    assert chain.stats.drafted > 0
    right = call(None).sequences[0]

    class Right(Proposes):
        def propose(self, history, limits):
            length = int(history.lengths[0])
            return [right[length : length + int(limits[0])].tolist()]

    got = call(Right(None, 3, 2))
    assert got.sequences[0].tolist() == right.tolist()
    assert got.stats.accepted == got.stats.drafted > 3


def test_parents_need_a_drafter_that_says_how_large_its_trees_are():
    with pytest.raises(ValueError, match=r"^Proposes\.propose must return a chain"):
        call(Proposes(lambda history, gamma: tree_of()))


@pytest.mark.covering(test=1)
@TREES
@pytest.mark.parametrize("method", ["start", "propose", "commit"])
def test_an_exception_frees_the_drafter(method, tree, monkeypatch):
    model, inputs, expected = plain_text((9,))

    class Breaks(Drafter):
        def propose(self, history, limits):
            return None

    def fails(self, *args):
        raise KeyError(method)

    drafter = Breaks()
    given = drafter if tree is None else [Proposes(lambda history, gamma: [[1]]), drafter]
    with monkeypatch.context() as patch:
        patch.setattr(Breaks, method, fails)
        with pytest.raises(KeyError, match=method) as raised:  # keeps the frames of that call
            run(model, inputs, drafter=given, tree=tree)
    assert run(model, inputs, drafter=given, tree=tree).sequences.tolist() == expected
    assert raised.tb is not None


class Several(PromptLookupDrafter):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def propose(self, history, limits):
        return self.value


TOO_MANY = r"up to 2 proposals of up to 2 tokens for each of 1 sequences, got tokens"
SEVERAL = {
    "floats": (torch.ones(1, 2), 2, TypeError, "tokens as a tensor of integers, got torch.float32"),
    "odd": (TOKENS, 2, ValueError, rf"{TOO_MANY} \[1, 3\] with num_proposals=2"),
    "too long": (TOKENS.repeat(1, 2), 2, ValueError, rf"{TOO_MANY} \[1, 6\] with num_proposals=2"),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_several_proposals_are_checked_too(case):
    value, count, error, message = SEVERAL[case]
    with pytest.raises(error, match=rf"^Several\.propose must return {message}"):
        call(Several(Draft(value, num_proposals=count)), tree=TrieTree(sequences=2, depth=2))
