"""Drafters of the caller: what they may return, what they are told, and what they cannot harm."""

import gc

import numpy as np
import pytest
import torch
from specdec_hf import (
    Draft,
    Drafter,
    PromptLookupDrafter,
    SpeculativeDecoder,
    TrieTree,
)
from support import hf_models
from support.hf_models import NEW, RAGGED, SAMPLED, run

from specdec_kernels import SampledDraft

TREES = pytest.mark.parametrize("tree", [None, TrieTree(depth=5)], ids=["chain", "trie"])


class Proposes(Drafter):
    """Proposes what a function of history and gamma returns."""

    name = "made up"

    def __init__(self, function):
        self.function = function

    def propose(self, history, limits):
        gamma = int(limits.max())
        return self.function(history, gamma)


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
            gamma = int(limits.max())
            return np.full((len(RAGGED), gamma), 1)

        def commit(self, outcome):
            outcome.lengths[:] = outcome.accepted[:] = -7

    class Reads(Drafter):
        def propose(self, history, limits):
            return None

        def commit(self, outcome):
            assert (outcome.lengths > 0).all()

    kwargs = {**SAMPLED, "temperature": [0.7] * 3, "rule": "match"}
    plain = run(model, inputs, **kwargs)
    drafters = Writes() if tree is None else [Writes(), Reads()]
    got = run(model, inputs, drafter=drafters, tree=tree, **kwargs)
    assert got.sequences.tolist() == plain.sequences.tolist()
    assert min(min(record.accepted) for record in got.stats.round_log) >= 0


FORMS = {
    "tensor": torch.tensor,
    "int32 tensor": lambda rows: torch.tensor(rows, dtype=torch.int32),
    "array": np.array,
    "uint8 array": lambda rows: np.array(rows, dtype=np.uint8),
    "lists": lambda rows: rows,
    "tuple of arrays": lambda rows: tuple(np.array(row) for row in rows),
    "list of tensors": lambda rows: [torch.tensor(row) for row in rows],
    "draft of lists": Draft,
    "counts in a list": lambda rows: Draft(rows, counts=[len(row) for row in rows]),
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


def test_lists_of_different_lengths_draft_as_much_as_they_hold():
    model, inputs, expected = plain_text()
    drafter = Proposes(lambda history, gamma: [[], [1], [1, 2, 3][:gamma]])
    got = run(model, inputs, drafter=drafter, max_new_tokens=5)
    assert got.stats.sequences[0].drafted_at == {}
    assert max(got.stats.sequences[1].drafted_at) == 0
    assert max(got.stats.sequences[2].drafted_at) == 2
    assert got.sequences.tolist() == [text[: max(RAGGED) + 5] for text in expected]
    nothing = run(model, inputs, drafter=always([[], [], []]), max_new_tokens=5)
    assert nothing.stats.gammas == [0] * 5


def rows(**other):
    """A draft whose distribution has other rows or statistics."""
    zeros = SampledDraft(torch.zeros(1, 2, 67), torch.zeros(1, 2), torch.zeros(1, 2), 1.0)
    return Draft([[1, 2]], distribution=zeros._replace(**other))


WRONG = {  # what propose returns for one sequence and gamma = 5, and the message
    "a number": (3, TypeError, "None, a Draft, or its tokens as a tensor, array or list, got int"),
    "tokens None": (Draft(None), TypeError, "as a tensor, array or list, got NoneType"),
    "bool tensor": (torch.ones(1, 2) > 0, TypeError, "tokens of an integer type, got torch.bool"),
    "float array": (np.ones((1, 2)), TypeError, "tokens of an integer type, got float64"),
    "bool list": ([[True]], TypeError, r"tokens\[0\]\[0\] must be an integer, got True"),
    "flat list": ([1], TypeError, r"tokens\[0\] must be a sequence, got 1"),
    "float rows": ([torch.ones(2)], TypeError, r"tokens\[0\]\[0\] must be an integer, got tensor"),
    "too many": (torch.ones(1, 6, dtype=int), ValueError, r"tokens \[1, 0..5\], got \[1, 6\]"),
    "long list": ([[1] * 6], ValueError, r"tokens \[1, 0..5\], got \[1, 6\]"),
    "two lists": ([[1], [1]], ValueError, r"tokens \[1, 0..5\], got 2 lists"),
    "meta": (torch.ones(1, 2, dtype=int, device="meta"), ValueError, "stores them, got meta"),
    "float counts": (Draft([[1]], counts=[1.0]), TypeError, "counts as integers .* got float64"),
    "device counts": (
        Draft([[1]], counts=torch.ones(1, dtype=int, device="meta")),
        TypeError,
        "counts as integers on the host, got a tensor on meta",
    ),
    "tensor as distribution": (
        Draft([[1, 2]], distribution=torch.zeros(1, 2, 67)),
        TypeError,
        "distribution that is None or a SampledDraft, got Tensor",
    ),
    "lists as thresholds": (rows(threshold=[[0.0]]), TypeError, "threshold as floats, got list"),
    "integer logits": (
        rows(logits=torch.zeros(1, 2, 67, dtype=int)),
        TypeError,
        "distribution.logits as floats, got torch.int64",
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
    "negative ids": ([[-7, 2]] * 3, "drafted ids outside the vocabulary"),
    "negative counts": (Draft([[1, 2]] * 3, counts=[-1, 2, 2]), "counts outside [0, gamma]"),
    "large counts": (Draft([[1, 2]] * 3, counts=[2, 3, 2]), "counts outside [0, gamma]"),
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
    broken.noise = "independent"
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


def test_a_note_names_the_first_round_it_is_true_of():
    model, inputs, expected = plain_text((9,))
    bad = Proposes(lambda history, gamma: [[66 if history.lengths[0] < 12 else 70]])
    got = run(model, inputs, drafter=bad)
    assert got.sequences.tolist() == expected
    [note] = got.stats.notes
    rounds = 2 + got.stats.gammas[1:].index(0)
    assert rounds in (3, 4)
    assert note.startswith(f"round {rounds}: ")


def test_a_distribution_that_leaves_no_residual_leaves_a_note():
    """P is uniform, and the statistics say that Q is twice as large everywhere."""
    model = hf_models.build("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    inputs = hf_models.prompts(RAGGED)
    uniform = torch.zeros(3, 2, 67)
    q = SampledDraft(uniform, torch.full((3, 2), np.log(67.0)).double(), uniform[..., 0] - 9, 1.0)
    wrong = q._replace(logsumexp=q.logsumexp - np.log(2.0))
    sampled = {"do_sample": True, "seed": 5, "rule": "token", "top_k": 0}
    for given, count in ((q, 0), (wrong, 1)):
        drafter = always(Draft([[1, 2]] * 3, distribution=given))
        drafter.noise = "independent"
        got = run(model, inputs, drafter=drafter, **sampled)
        notes = [note for note in got.stats.notes if "the residual is empty" in note]
        assert len(notes) == count, got.stats.notes


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


@pytest.mark.covering(test=1)
@TREES
@pytest.mark.parametrize("method", ["start", "propose", "commit"])
def test_an_exception_frees_the_drafter(method, tree):
    model, inputs, expected = plain_text((9,))

    class Breaks(Drafter):
        broken = True

        def propose(self, history, limits):
            return None

    works = getattr(Breaks, method)

    def fails(self, *args):
        if self.broken:
            raise KeyError(method)
        return works(self, *args)

    setattr(Breaks, method, fails)
    drafter = Breaks()
    other = Proposes(lambda history, gamma: [[1]])
    given = drafter if tree is None else [other, drafter]
    with pytest.raises(KeyError, match=method) as raised:  # keeps the frames of the failed call
        run(model, inputs, drafter=given, tree=tree)
    drafter.broken = False
    assert run(model, inputs, drafter=given, tree=tree).sequences.tolist() == expected
    assert raised.tb is not None


def test_a_chain_carries_integers_to_its_outcome():
    seen = []

    class Carries(Proposes):
        def commit(self, outcome):
            seen.append(outcome.carried)

    def chain(history, gamma):
        return Draft(np.ones((len(RAGGED), gamma), int), carried=torch.arange(len(RAGGED))[:, None])

    run(*plain_text()[:2], drafter=Carries(chain))
    assert {tuple(carried.shape) for carried in seen} == {(len(RAGGED), 0), (len(RAGGED), 1)}
    assert seen[1].flatten().tolist() == list(range(len(RAGGED)))


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("carried", torch.zeros(1, 1), TypeError),
        ("carried", torch.zeros(1, 1, dtype=torch.int64), ValueError),
        ("draft_rows", torch.zeros(len(RAGGED), 1, dtype=torch.int32), ValueError),
        ("scores", torch.zeros(len(RAGGED), 1), ValueError),
    ],
)
def test_a_chain_with_what_it_cannot_have_is_refused(field, value, error):
    drafter = Proposes(lambda history, gamma: Draft([[1]] * len(RAGGED), **{field: value}))
    with pytest.raises(error, match=f"Proposes.propose must return {field} "):
        run(*plain_text()[:2], drafter=drafter)


def test_a_class_must_agree_with_its_entry():
    with pytest.raises(TypeError, match=r"Wrong.draws must be False, as in its entry"):

        class Wrong(Drafter, entry="nasd"):
            draws = True


def test_the_store_of_committed_tokens_grows_with_the_text(monkeypatch):
    monkeypatch.setattr("specdec_hf.loop.begin.SLOTS_AHEAD", 2)
    model, inputs, expected = plain_text()
    shapes = set()

    def copies(history, gamma):
        shapes.add(history.tokens.shape[1])
        return history.last(4)[:, :gamma]

    assert run(model, inputs, drafter=Proposes(copies)).sequences.tolist() == expected
    assert len(shapes) > 1
