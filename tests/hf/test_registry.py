"""Drafters by name, drafters of trees of their own, and what a drafter learns of the target."""

import numpy as np
import pytest
import torch
from specdec_hf import Candidates, Draft, Drafter, LayersDrafter, generate
from specdec_hf.drafting.registry import DRAFTERS, class_of, entry_of, usage
from support import hf_models

RAGGED = (9, 5, 12)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_entry_names_its_class(name):
    entry = DRAFTERS[name]
    made = class_of(name)
    assert issubclass(made, Drafter)
    assert made.name == name
    assert entry.capabilities().items() <= {n: getattr(made, n) for n in dir(made)}.items()
    assert entry.is_model == issubclass(made, LayersDrafter)
    assert entry.makes_forward or made.forward is Drafter.forward
    assert entry.summary
    assert entry_of(usage(name).replace("[", "").replace("]", "")) is entry


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt_lookup:3", "drafter 'prompt_lookup' takes no value, got 'prompt_lookup:3'"),
        ("prompt_lookup:", "drafter must be prompt_lookup, got 'prompt_lookup:'"),
        ("magic", "got 'magic'; drafters with a name are auto, prompt_lookup, "),
        ("promt_lookup", "got 'promt_lookup'; did you mean 'prompt_lookup'?"),
        ("Ngram:2", "got 'Ngram:2'; did you mean 'ngram'?"),
    ],
)
def test_a_wrong_name_is_refused(text, message):
    with pytest.raises(ValueError) as raised:
        generate(hf_models.tiny("llama"), **hf_models.prompts((5,)), drafter=text)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("argument", "given", "name"),
    [("num_assistant_tokens_schedule", "heuristik", "heuristic"), ("rule", "blocks", "block")],
)
def test_a_schedule_or_rule_that_is_nearly_one_is_named(argument, given, name):
    with pytest.raises(ValueError, match=rf"got '{given}'; did you mean '{name}'\?"):
        generate(
            hf_models.tiny("llama"), **hf_models.prompts((5,)), drafter="prompt_lookup",
            **{argument: given},
        )  # fmt: skip


class Observer:
    """Drafts what an earlier call has taught it, and keeps every observation."""

    candidates = 3

    def __init__(self):
        self.seen = []

    def observe(self, history, candidates):
        texts = [history.tokens[b, :n].copy() for b, n in enumerate(history.lengths)]
        self.seen.append((texts, candidates))


class Chains(Observer, Drafter):
    """The target's own next token may be among them: they are simply counted up."""

    def propose(self, history, limits):
        gamma = int(limits.max())
        return (history.last(1) + np.arange(1, gamma + 1)) % 64


class Trees(Observer, Drafter):
    name = "pairs"
    size, depth = 4, 2

    def propose(self, history, limits):
        last = torch.from_numpy(history.last(1).copy())
        tokens = (last + torch.tensor([1, 2, 3, 4])) % 64
        parents = torch.tensor([-1, -1, 0, 1])
        tokens[torch.from_numpy(limits < 1)] = -1
        tokens[torch.from_numpy(limits < 2), 2:] = -1
        return Draft(tokens, parents.expand_as(tokens), depth=2)


@pytest.mark.parametrize("made", [Chains, Trees])
def test_a_drafter_learns_the_most_likely_next_tokens(made):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    settings = {"max_new_tokens": 6, "do_sample": False}
    drafter = made()
    got = generate(model, **inputs, **settings, drafter=drafter, guard=False)
    assert torch.equal(got, model.generate(**inputs, **settings))
    checked = 0
    for texts, seen in drafter.seen:
        for b, row in np.argwhere(seen.tokens >= 0).tolist():
            path, above = [], row
            while above > 0:
                path.insert(0, int(seen.tokens[b, above]))
                above = int(seen.parents[b, above])
            assert above == 0
            assert seen.tokens[b, 0] == texts[b][-1]
            text = torch.from_numpy(np.append(texts[b], path).astype(np.int64))[None]
            with torch.no_grad():
                expected = model(text).logits[0, -1].topk(3).indices
            assert seen.ids[b, row].tolist() == expected.tolist()
            checked += 1
    assert checked > 30


def test_the_rows_of_a_path_hang_below_one_another():
    """Other rows may hold the same token."""
    tokens, parents = np.array([[4, 5, 6, 6]]), np.array([[-1, 0, 0, 1]])
    candidates = Candidates(tokens, parents, np.zeros((1, 4, 1), dtype=np.int64))
    assert candidates.path(0, [5, 6, 6]) == [0, 1, 3]


def test_a_drafter_of_trees_takes_no_layout_and_no_number_of_tokens():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((5,))
    with pytest.raises(ValueError, match="tree must be a TrieTree or None with drafter pairs"):
        generate(model, **inputs, drafter=Trees(), tree=(2, 1))
    with pytest.raises(ValueError, match="num_assistant_tokens must not be given with a drafter"):
        generate(model, **inputs, drafter=Trees(), num_assistant_tokens=3)
