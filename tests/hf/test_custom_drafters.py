"""Drafters of the caller, of chains and trees: what they may return, are told, and cannot harm."""

import itertools

import numpy as np
import pytest
import torch
from specdec_hf import (
    Draft,
    Drawn,
    SpeculativeDecoder,
    StatelessDrafter,
    SuffixAutomatonDrafter,
    TrieTree,
)
from support import hf_models
from support.hf_models import NEW, RAGGED, SAMPLED, run

TREES = pytest.mark.parametrize("tree", [None, TrieTree(depth=5)], ids=["chain", "trie"])


class Proposes(StatelessDrafter):
    name = "made up"

    def __init__(self, function, size=0, depth=0):
        self.function, self.size, self.depth = function, size, depth

    def propose(self, texts, limits):
        return self.function(texts, int(limits.max()))


def always(value):
    """Proposes the same, and nothing where the round takes no two tokens."""
    return Proposes(lambda texts, gamma: value if gamma > 1 else None)


def plain_text(lengths=RAGGED):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(lengths)
    return model, inputs, model.generate(**inputs, max_new_tokens=NEW, do_sample=False).tolist()


def write_arrays(texts, gamma):
    for array in (texts.tokens, texts.lengths, texts.active):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 1
    texts.last(2)[:] = 3


def write_tensors(texts, gamma):
    for array in (texts.tokens, texts.lengths, texts.active):
        torch.from_numpy(array).zero_()


def replace_arrays(texts, gamma):
    for name in ("tokens", "lengths", "active"):
        with pytest.raises(AttributeError, match=name):
            setattr(texts, name, None)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.covering(test=1)
@TREES
@pytest.mark.parametrize("write", [write_arrays, write_tensors, replace_arrays])
def test_a_drafter_cannot_write_to_the_texts(write, tree):
    model, inputs, expected = plain_text()
    assert run(model, inputs, drafter=Proposes(write), tree=tree).sequences.tolist() == expected


@TREES
def test_a_drafter_cannot_write_to_seeds_parameters_or_lengths(tree):
    model, inputs, _ = plain_text()

    class Writes(StatelessDrafter):
        def begin(self, call):
            call.seeds.zero_()
            call.sampling.temperature.fill_(0.1)
            return self

        def propose(self, texts, limits):
            return np.full((len(RAGGED), int(limits.max())), 1)

        def commit(self, texts, done):
            assert (done.lengths > 0).all()
            done.lengths[:] = done.accepted[:] = -7
            done.active[:] = False

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

    def foresee(texts, gamma):
        rows = []
        for text, length, padding in zip(expected, texts.lengths, padded, strict=True):
            ahead = text[padding + length :][:gamma]
            assert texts.tokens[len(rows), :length].tolist() == text[padding:][:length]
            rows.append(ahead + [0] * (gamma - len(ahead)))
        return FORMS[form](rows)

    padded = [max(RAGGED) - length for length in RAGGED]
    got = run(model, inputs, drafter=Proposes(foresee), tree=tree)
    assert got.sequences.tolist() == expected
    assert got.stats.mean_acceptance_length == NEW / 5  # with the round that reads the prompt
    assert got.stats.notes == []


def drawn(rows, tokens=2, batch_size=1, **other):
    """A draft of tokens 1, each with a row of a distribution."""
    shape = (batch_size, rows)
    held = {"logits": torch.zeros(*shape, 67), "logsumexp": torch.zeros(shape),
            "threshold": torch.zeros(shape), "tokens": torch.ones(shape, dtype=int)}  # fmt: skip
    return Draft([[1] * tokens] * batch_size, drawn=Drawn(**{**held, **other}))


ROW_ELSEWHERE = torch.zeros(1, 2, device="meta")
WRONG = {  # what propose returns for one sequence and gamma = 5, and the message
    "a number": (3, TypeError, "None, a Draft, or its tokens as a tensor, array or list, got int"),
    "bool tensor": (torch.ones(1, 2) > 0, TypeError, "tokens of an integer type, got torch.bool"),
    "flat list": ([1], TypeError, r"tokens\[0\] must be a sequence, got 1"),
    "too many": (torch.ones(1, 6, dtype=int), ValueError, r"tokens \[1, 0..5\], got \[1, 6\]"),
    "two lists": ([[1], [1]], ValueError, r"tokens \[1, 0..5\], got 2 lists"),
    "meta": (torch.ones(1, 2, dtype=int, device="meta"), ValueError, "stores them, got meta"),
    "float counts": (Draft([[1]], counts=[1.0]), TypeError, "counts as integers .* got float64"),
    "tensor as distribution": (
        Draft([[1, 2]], drawn=torch.zeros(1, 2, 67)),
        TypeError,
        "drawn as None or what call.draw returned, got Tensor",
    ),
    **{
        f"{name} as {value}": (drawn(2, **{name: value}), ValueError, f"returned it, with {name} ")
        for name, value in (("threshold", None), ("logits", [[0.0]]), ("logsumexp", ROW_ELSEWHERE))
    },
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
    "few rows": (drawn(1, batch_size=3), "gave a distribution that is not [B, gamma, V]"),
    "few sequences": (
        Draft([[1, 2]] * 3, drawn=drawn(2).drawn), "gave a distribution that is not [B, gamma, V]"
    ),
}  # fmt: skip
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
    broken = always(drawn(2, 2, 3, logits=NAN, logsumexp=NAN[..., 0], threshold=NAN[..., 0]))
    got = run(model, inputs, drafter=broken, rule="token", **SAMPLED)
    [note] = got.stats.notes
    assert note.startswith("round 2: drafter made up (Proposes) gave a distribution that is not f")
    assert got.stats.accepted == 0


def test_ids_that_only_the_verification_sees_leave_a_note(monkeypatch):
    """The host does not look at drafts that lie on a device."""
    model, inputs, expected = plain_text()

    def unread(drafter, proposed, texts, gamma, call):
        return Draft(torch.full((3, 1), 10**6), counts=np.ones(3, dtype=np.int64))

    monkeypatch.setattr("specdec_hf.drafting.checks.read_chain", unread)
    got = run(model, inputs, drafter=always([[1]] * 3))
    assert got.sequences.tolist() == expected
    assert got.stats.notes == [
        "round 2: drafter made up (Proposes) drafted ids outside the vocabulary; "
        "those drafts count as absent"
    ]


@TREES
def test_a_drafter_serves_several_calls_at_once(tree):
    """Also one that its caller lists twice, in a call that begins between the rounds of another."""
    model, inputs, expected = plain_text()
    drafter = SuffixAutomatonDrafter()
    given = drafter if tree is None else [drafter, drafter]
    decoder = SpeculativeDecoder(given, tree=tree, guard=False)
    streams = [
        decoder.stream(model, **inputs, max_new_tokens=NEW, do_sample=False) for _ in range(3)
    ]
    texts = [[[] for _ in RAGGED] for _ in streams]
    for steps in itertools.zip_longest(*streams):
        for text, step in zip(texts, steps, strict=True):
            if step is not None:
                text[step.sequence] += step.tokens
    assert texts == [[text[max(RAGGED) :] for text in expected]] * 3
    kept = vars(drafter).copy()
    assert run(model, inputs, drafter=given, tree=tree).stats.accepted > 0
    assert vars(drafter) == kept


@pytest.mark.parametrize("field", ["carried", "draft_rows", "scores"])
def test_a_chain_with_what_it_cannot_have_is_refused(field):
    dtype = {"carried": torch.int64, "draft_rows": torch.int32}.get(field, torch.float32)
    count = 1 if field == "carried" else len(RAGGED)  # that chains carry something is allowed
    draft = Draft([[1]] * len(RAGGED), **{field: torch.zeros(count, 1, dtype=dtype)})
    with pytest.raises(ValueError, match=f"Proposes.propose must return {field} "):
        run(*plain_text()[:2], drafter=Proposes(lambda texts, gamma: draft))


def test_the_store_of_committed_tokens_grows_with_the_text(monkeypatch):
    monkeypatch.setattr("specdec_hf.loop.begin.SLOTS_AHEAD", 2)
    model, inputs, expected = plain_text()
    shapes = set()

    def copies(texts, gamma):
        shapes.add(texts.tokens.shape[1])
        return texts.last(4)[:, :gamma]

    assert run(model, inputs, drafter=Proposes(copies)).sequences.tolist() == expected
    assert len(shapes) > 1


TOKENS, PARENTS = torch.tensor([[3, 4, 5]]), torch.tensor([[-1, -1, 0]])
ROWS = drawn(2).drawn


def in_trees(value):
    return Proposes(lambda texts, gamma: value, 3, 2)


def call(drafter, **kwargs):
    return hf_models.decode(hf_models.tiny("llama"), drafter=drafter, max_new_tokens=8, **kwargs)


def tree_of(tokens=TOKENS, parents=PARENTS, **more):
    return Draft(tokens, parents, depth=2, **more)


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
        tree_of(drawn=ROWS, draft_rows=OTHER_ROWS), ValueError, r"draft_rows \[1, 3\], got"
    ),
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
    got = call(Proposes(lambda texts, most: [right[texts.lengths[0] :][:most].tolist()], 3, 2))
    assert got.sequences[0].tolist() == right.tolist()
    assert got.stats.accepted == got.stats.drafted > 3


def test_what_a_tree_has_beyond_a_limit_is_cut_off():
    out = call(in_trees(tree_of()), num_assistant_tokens_schedule="optimal:max_length=1")
    assert {record.drafted[0] for record in out.stats.round_log} == {0, 2}


def test_parents_need_a_drafter_that_says_how_large_its_trees_are():
    with pytest.raises(ValueError, match=r"^Proposes\.propose must return a chain"):
        call(Proposes(lambda texts, gamma: tree_of()))


@pytest.mark.covering(test=1)
@TREES
@pytest.mark.parametrize("method", ["begin", "propose", "commit"])
def test_an_exception_of_a_drafter_ends_the_call_alone(method, tree, monkeypatch):
    model, inputs, expected = plain_text((9,))

    class Breaks(StatelessDrafter):
        def propose(self, texts, limits):
            return None

    def fails(self, *args):
        raise KeyError(method)

    drafter = Breaks()
    given = drafter if tree is None else [Proposes(lambda texts, gamma: [[1]]), drafter]
    with monkeypatch.context() as patch:
        patch.setattr(Breaks, method, fails)
        with pytest.raises(KeyError, match=method):
            run(model, inputs, drafter=given, tree=tree)
    assert run(model, inputs, drafter=given, tree=tree).sequences.tolist() == expected


@TREES
def test_what_begin_returns_is_checked_by_name(tree):
    class Nothing(StatelessDrafter):
        def propose(self, texts, limits):
            return None

        def begin(self, call):
            return 3

    given = Nothing() if tree is None else [Nothing(), "prompt_lookup"]
    with pytest.raises(TypeError, match=r"^Nothing\.begin must return a State, got int$"):
        run(*plain_text()[:2], drafter=given, tree=tree)


TOO_MANY = r"up to 2 proposals of up to 2 tokens for each of 1 sequences, got tokens"
SEVERAL = {
    "floats": (torch.ones(1, 2), TypeError, "tokens as a tensor of integers, got torch.float32"),
    "odd": (TOKENS, ValueError, rf"{TOO_MANY} \[1, 3\] with num_proposals=2"),
    "too long": (TOKENS.repeat(1, 2), ValueError, rf"{TOO_MANY} \[1, 6\] with num_proposals=2"),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_several_proposals_are_checked_too(case):
    value, error, message = SEVERAL[case]
    drafter = always(Draft(value, num_proposals=2))
    drafter.several = True
    with pytest.raises(error, match=rf"^Proposes\.propose must return {message}"):
        call(drafter, tree=TrieTree(sequences=2, depth=2))
