"""What a call tells of its rounds: counts and times, and, traced, what was compared.

A step names the drafts that its recovered token replaces, traced or not.
"""

import json

import numpy as np
import pytest
from specdec_hf import SpeculativeDecoder, StatelessDrafter, TrieTree
from specdec_hf.schedules.base import Schedule
from support import hf_models
from support.hf_models import NEW, RAGGED, Clock, run

CALLS = {"plain": {}, "model": {"do_sample": True, "seed": 1}, "tree": {"tree": (2, 1)}}


@pytest.mark.parametrize("kind", CALLS)
def test_the_log_of_rounds_adds_up_to_the_statistics(kind):
    drafter = None if kind == "plain" else hf_models.perturbed("llama")
    options = {"drafter": drafter, **CALLS[kind]}
    out = hf_models.decode(
        hf_models.tiny("llama"), (9, 4, 12), **options, max_new_tokens=9, clock=Clock(0.25)
    )
    stats, log = out.stats, out.stats.round_log
    assert len(log) == stats.rounds
    for b, one in enumerate(stats.sequences):
        assert sum(record.drafted[b] for record in log) == one.drafted
        assert sum(record.accepted[b] for record in log) == one.accepted
        assert sum(record.emitted[b] for record in log) == one.new_tokens
    for phase, seconds in stats.time_split.items():
        assert sum(getattr(record, phase) for record in log) == seconds
    assert log[0].began == 0.25
    assert all(record.seconds == 0.75 for record in log)
    ends = [record.began + record.seconds for record in log]
    assert all(record.began >= end for record, end in zip(log[1:], ends, strict=False))
    written = json.loads(json.dumps(stats.to_dict()))["round_log"]
    assert written == [record.to_dict() for record in log]


class Foresees(StatelessDrafter):
    """Drafts how the texts go on, also beyond their ends; remembers what it was asked."""

    def __init__(self, model, inputs):
        longer = model.generate(**inputs, max_new_tokens=NEW + 8, do_sample=False)
        begins = longer.shape[1] - NEW - 8 - inputs["attention_mask"].sum(1)
        self.texts = [row[begin:].tolist() for row, begin in zip(longer, begins, strict=True)]
        self.asked = []

    def propose(self, history, limits):
        gamma = int(limits.max())
        self.asked.append((gamma, history.lengths.copy(), history.active.copy()))
        return [text[n : n + gamma] for text, n in zip(self.texts, history.lengths, strict=True)]


def rounds_of_right_drafts(limit, end):
    """(drafted, accepted, emitted) of every round of a sequence that emits ``end`` tokens.

    Drafts behind the end count as absent.
    """
    rounds, new = [(0, 0, 1)], 1
    while new < end:
        emitted = min(min(limit, NEW - new - 1) + 1, end - new)
        drafted = min(limit, NEW - new - 1, emitted)
        rounds.append((drafted, drafted, emitted))
        new += emitted
    return rounds


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_right_drafts_are_all_accepted_up_to_the_limits_and_the_end_of_the_text(name):
    model, inputs, limits = hf_models.tiny(name), hf_models.prompts(RAGGED), (1, 3, 5)
    drafter, outcomes = Foresees(model, inputs), []

    class Limits(Schedule):
        def lengths(self, most):
            return np.minimum(most, limits)

        def observe(self, outcome):
            outcomes.append(outcome)

    new = [text[n : n + NEW] for text, n in zip(drafter.texts, RAGGED, strict=True)]
    stop = new[2][8]  # inside of the draft that follows seven tokens
    ends = [text.index(stop) + 1 if stop in text else NEW for text in new]
    out = run(
        model, inputs, drafter=drafter, eos_token_id=stop, num_assistant_tokens_schedule=Limits()
    )
    expected = [rounds_of_right_drafts(*one) for one in zip(limits, ends, strict=True)]
    assert any(drafted == emitted for drafted, _, emitted in expected[2])
    for b, rounds in enumerate(expected):
        found = [(r.drafted[b], r.accepted[b], r.emitted[b]) for r in out.stats.round_log]
        assert found == rounds + [(0, 0, 0)] * (out.stats.rounds - len(rounds))
    assert not any(outcome.rejected.any() for outcome in outcomes)


@pytest.mark.parametrize("tree", [None, TrieTree()], ids=["chain", "tree"])
def test_a_round_drafts_no_more_than_the_sequences_that_go_on_can_take(tree):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 4))
    drafter = Foresees(model, inputs)
    run(model, inputs, drafter=drafter, tree=tree, eos_token_id=drafter.texts[0][9 + 2])
    for gamma, lengths, active in drafter.asked:
        most = NEW - (lengths - (9, 4)) - 1
        assert gamma == min(5, most[active].max())
    gamma, _, active = drafter.asked[-1]
    assert gamma < 5
    assert active.tolist() == [False, True]


TEMPERATURE = 0.3


def traced(rule, noise, batch=(9,), tree=None):
    """The rounds of a call, whose steps are those of a call without `trace`."""
    inputs, rounds = hf_models.prompts(batch), []
    settings = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0}
    settings = {"do_sample": False} if rule == "greedy" else settings
    steps, untraced = (
        list(
            SpeculativeDecoder(
                hf_models.perturbed("llama", noise), num_assistant_tokens=None if tree else 3,
                tree=tree, rule=rule, seed=3, guard=False, trace=trace,
            ).stream(hf_models.tiny("llama"), **inputs, **settings, max_new_tokens=24)
        )
        for trace in (rounds.append, None)
    )  # fmt: skip
    assert [step for r in rounds for step in r.steps] == steps == untraced
    return rounds


@pytest.mark.parametrize("rule", ["multi_draft", "target_only", "traversal"])
def test_traced_trees_explain_every_token(rule):
    rounds = traced(rule, 0.05, tree=(2, 2))
    first, *others = rounds
    assert (first.parents, first.path, first.draft_token_ids.shape) == (None, None, (1, 0))
    verdicts = set()
    for r in others:
        if r.parents is None:  # the last token is never drafted
            continue
        (step,), ids = r.steps, r.draft_token_ids[0].tolist()
        parents, path = r.parents[0].tolist(), [n for n in r.path[0].tolist() if n >= 0]
        assert r.logits.shape[1] == len(ids) + 1
        assert [parents[n] for n in path] == [-1, *path][: len(path)]
        accepted = [i for i, kind in enumerate(step.kinds) if kind == "accepted"]
        assert [ids[n] for n in path][: len(accepted)] == [step.tokens[i] for i in accepted]
        spelled = {-1: []}
        for n, parent in enumerate(parents):
            spelled[n] = [*spelled[parent], ids[n]]
        last = path[-1] if path else -1
        # Nodes that spell one path are one, but for traversal.
        ends = [n for n in spelled if spelled[n] == spelled[last]]
        ends = [last] if rule == "traversal" else ends
        children = [ids[n] for n, parent in enumerate(parents) if parent in ends and ids[n] >= 0]
        recovered = step.kinds[-1] == "recovered"
        assert step.rejected == (list(dict.fromkeys(children)) if recovered else [])
        assert not recovered or step.tokens[-1] not in children or rule != "target_only"
        verdicts.add(recovered)
        if rule == "target_only":
            target = (r.logits[0].double() / TEMPERATURE).softmax(-1)
            for n in r.accept_probs[0].isfinite().nonzero().flatten().tolist():
                expected = float(target[parents[n] + 1, ids[n]])
                assert float(r.accept_probs[0, n]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert verdicts == {True, False}


@pytest.mark.parametrize("batch", [(9,), (9, 5)], ids=str)
@pytest.mark.parametrize("rule", ["token", "greedy"])
def test_a_step_names_the_draft_that_its_recovered_token_replaces(batch, rule):
    """That is so in batches too, whose sequences draft as many tokens as they may."""
    seen = set()
    for r in traced(rule, 0.3, batch):
        for step in r.steps:
            recovered = step.kinds[-1:] == ["recovered"]
            draft = r.draft_token_ids[step.sequence, len(step.tokens) - 1 :][:1].tolist()
            assert step.rejected == (draft if recovered else [])
            assert not recovered or step.rejected != step.tokens[-1:]
            seen.add((step.sequence, recovered))
    assert {(b, True) for b in range(len(batch))} < seen
