"""What is learnt from measured times, and the schedule "optimal" and the guard that read it.

The machines are made up, and their times are formulas. Drafters say what they cost before.
"""

import math

import numpy as np
import pytest
from specdec_hf import BenefitGuard, StatelessDrafter, generate
from specdec_hf.schedules.base import Outcome, ScheduleContext
from specdec_hf.schedules.costs import Costs, MonotoneCost
from specdec_hf.schedules.registry import make_schedule
from support import drafter_proof, hf_models
from support.hf_models import head_for


def expected_tokens(alpha, gamma):
    """Leviathan et al. 2023, equation 1."""
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


class Machine:
    """Runs rounds of one sequence whose drafts are accepted with probability alpha each.

    Args:
        alpha: acceptance rate.
        step: seconds of a draft step.
        forward: seconds of a target's forward of n tokens.
        noise: standard deviation of the times' logarithm.
    """

    def __init__(self, alpha, step, forward, *, noise=0.0, schedule="optimal", number=5, seed=0):
        self.alpha, self.step, self.forward, self.noise = alpha, step, forward, noise
        self.generator = np.random.default_rng(seed)
        self.costs = Costs(relative_cost=0.0 if step == 0 else step / forward(1))
        self.schedule = make_schedule(schedule)
        self.schedule.start(ScheduleContext(1, number, 100, costs=self.costs))
        self.seconds = self.tokens = 0.0
        self.lengths = []

    def slow(self, seconds):
        return seconds * math.exp(self.noise * self.generator.standard_normal())

    def round(self, length):
        accepted = 0
        while accepted < length and self.generator.random() < self.alpha:
            accepted += 1
        draft, rest = self.slow(self.step * length), self.slow(self.forward(1 + length))
        self.costs.observe(length, length, draft, rest)
        outcome = [np.array([x]) for x in (length, accepted, accepted < length)]
        self.schedule.observe(Outcome(*outcome))
        self.seconds += draft + rest
        self.tokens += accepted + 1
        self.lengths.append(length)
        return draft + rest, accepted + 1

    def run(self, rounds):
        for _ in range(rounds):
            self.round(int(self.schedule.lengths(np.array([100]))[0]))

    def best(self):
        """The length that the formula prefers, and its tokens per second."""
        speeds = [
            expected_tokens(self.alpha, g) / (g * self.step + self.forward(g + 1))
            for g in range(1, 17)
        ]
        return 1 + int(np.argmax(speeds)), max(speeds)


def wide(n):
    return 0.01 * (1 + 0.2 * (n - 1) / 15)


def jump(n):
    """Two tokens cost much more than one, and further ones little, as on a processor."""
    return 0.0053 if n == 1 else 0.0080 + 0.0002 * n


def steep(n):
    return 0.01 * (1 + 0.6 * (n - 1) / 5)


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.85])
@pytest.mark.parametrize("step", [0.0, 0.0005, 0.003])
@pytest.mark.parametrize("forward", [wide, steep, jump])
def test_the_speed_is_close_to_the_best_constant_length(alpha, step, forward):
    machine = Machine(alpha, step, forward, noise=0.05)
    machine.run(600)
    best, _ = machine.best()
    expected = expected_tokens(alpha, best) / (best * step + forward(best + 1))
    assert machine.tokens / machine.seconds > 0.93 * expected


def test_no_length_is_tried_that_is_expected_to_be_much_slower():
    machine = Machine(0.05, 0.02, wide)
    machine.run(100)
    assert set(machine.lengths[30:]) == {1}


def guarded(machine, guard, tokens, prompt=20):
    """Decode up to so many tokens; gives the seconds, and those of plain decoding."""
    prefill = machine.forward(prompt)
    machine.costs.observe_prompt(prompt, prefill)
    guard.start(machine.costs, tokens)
    seconds, emitted, number, notes = prefill, 0.0, 0, []
    while emitted < tokens:
        length = int(machine.schedule.lengths(np.array([100]))[0])
        length = guard.affordable(number, length)
        spent, made = machine.round(length)
        note = guard.observe(length, made, spent)
        notes += [note] if note else []
        seconds, emitted, number = seconds + spent, emitted + made, number + 1
    return seconds, prefill + emitted * machine.forward(1), notes


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("tokens", [32, 200, 5000])
@pytest.mark.parametrize("schedule", ["constant", "heuristic", "optimal"])
@pytest.mark.parametrize("step", [0.0, 0.004])
def test_a_call_never_loses_more_than_three_percent(alpha, tokens, schedule, step):
    machine = Machine(alpha, step, steep, noise=0.02, schedule=schedule)
    seconds, plain, _ = guarded(machine, BenefitGuard(max_loss=0.02), tokens)
    assert seconds < 1.03 * plain


def test_the_guard_rejects_nothing_that_pays_and_without_its_account_the_bound_fails():
    machine = Machine(0.8, 0.0, wide, schedule="constant")
    seconds, plain, notes = guarded(machine, BenefitGuard(max_loss=0.02), 400)
    assert seconds < 0.4 * plain
    assert notes == []
    assert machine.lengths.count(0) < 10
    machine = Machine(0.0, 0.004, steep, schedule="constant")
    seconds, plain, notes = guarded(machine, BenefitGuard(max_loss=math.inf), 64)
    assert seconds > 1.1 * plain
    assert "speculation is slower than plain decoding here" in notes[0]
    assert "drafting pauses" in notes[0]


# What each forward of the target and each draft take, and how many tokens of a draft are wrong.
CLOCKS = {
    "free and right": (lambda n: 1.0, 0.0, False),
    "dear drafts": (lambda n: 1.0, 3.0, True),
    "dear and right": (lambda n: 1.0, 9.0, False),
    "dear tokens": (lambda n: 1.0 * n, 0.0, True),
    "first token dear": (lambda n: 1.0 if n == 1 else 1.8, 0.0, True),
}
HARMLESS = {"do_sample": False, "max_new_tokens": 100}
READING = {"do_sample": True, "seed": 1, "rule": "token", "max_new_tokens": 40}


class Knows(StatelessDrafter):
    """Drafts the text that it knows or a wrong one, and takes so many seconds of a clock."""

    def __init__(self, text, wrong, now, seconds):
        self.text, self.wrong, self.now, self.seconds = text, wrong, now, seconds

    def propose(self, history, limits):
        self.now[0] += self.seconds
        n, most = int(history.lengths[0]), int(limits[0])
        return [[(t + self.wrong) % hf_models.VOCAB for t in self.text[n : n + most]]]


@pytest.mark.parametrize("call", [HARMLESS, READING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CLOCKS)
def test_no_call_is_slower_than_plain_decoding_without_a_note_that_says_so(name, call):
    """By a clock of made-up seconds, over the whole loop; the control is a call without a guard."""
    forward, seconds, wrong = CLOCKS[name]
    model, now = hf_models.build("llama"), [0.0]

    def pass_time(module, args, kwargs):
        now[0] += forward(kwargs["input_ids"].shape[1])

    model.register_forward_pre_hook(pass_time, with_kwargs=True)

    def run(**settings):
        began = now[0]
        out = generate(
            model, **hf_models.prompts((9,)), clock=lambda: now[0], self_check=False,
            compile=False, return_dict_in_generate=True, **call, **settings,
        )  # fmt: skip
        return out, now[0] - began

    plain, alone = run(drafter=None)
    text = plain.sequences[0].tolist()
    guard = BenefitGuard(max_loss=0.02) if call is HARMLESS else None
    out, took = run(drafter=Knows(text, wrong, now, seconds), guard=guard)
    notes = " ".join(out.stats.notes)
    if call is HARMLESS:
        assert out.sequences.tolist() == plain.sequences.tolist()
        assert took <= 1.05 * alone, "what the first draft takes is not known before"
    assert took <= 1.05 * alone or "speculation is slower than plain decoding here" in notes
    _, free = run(drafter=Knows(text, wrong, now, seconds), guard=False)
    if name in ("dear drafts", "dear tokens", "first token dear"):
        assert free > 1.2 * alone, "the control"
    if name == "free and right" and call is HARMLESS:
        assert took < 0.4 * alone
        assert out.stats.benefit > 4, "tokens of a round with five drafts"


def test_a_guard_that_must_not_stop_only_reports():
    machine = Machine(0.1, 0.01, steep, schedule="constant")
    _, _, notes = guarded(machine, BenefitGuard(stops=False), 60)
    assert machine.lengths.count(0) == 1
    assert machine.lengths[5] == 0, "the plain round has a fixed number"
    assert "drafting goes on because the text must not depend on time" in notes[0]


def test_monotone_costs_by_hand():
    cost = MonotoneCost()
    for n, seconds in ((1, 1.0), (3, 4.0), (5, 2.0), (9, 5.0), (9, 5.0), (9, 99.0)):
        cost.observe(n, seconds)
    # 3 and 5 are pooled to their mean; the median of 9 is 5.
    assert [cost.at(n) for n in (0, 1, 2, 3, 4, 5, 7, 9)] == [1, 1, 2, 3, 3, 3, 4, 5]
    assert cost.at(17) == 5 + 8 * 0.5
    origin = MonotoneCost(from_zero=True)
    origin.observe(4, 2.0)
    assert (origin.at(0), origin.at(1), origin.at(8)) == (0.0, 0.5, 4.0)


def test_a_draft_models_first_round_says_nothing_about_others():
    costs = Costs(relative_cost=0.5)
    costs.observe_prompt(9, 3.0)
    costs.observe(0, 0, 0.0, 1.0)
    assert costs.round(4) == pytest.approx(2.0 + 4 * 0.5)
    costs.observe(4, 4, 50.0, 1.5)
    costs.observe(4, 4, 0.4, 1.5)
    assert costs.round(4) == pytest.approx(1.9)
    costs.observe(0, 4, 9.0, 1.5)  # of absent nodes alone
    assert costs.round(4) == pytest.approx(1.9)


def test_what_nothing_was_measured_of_lies_between_the_bounds_of_all_machines():
    """A forward of n tokens takes as much as one of fewer at least, and n plain rounds at most."""
    costs = Costs()
    costs.observe(0, 0, 0.0, 1.0)
    assert [costs.round(n) for n in (0, 1, 5)] == [1.0, 1.5, 3.5], "no prompt: halfway"
    costs.observe_prompt(0, 9.0)
    assert costs.round(5) == 3.5, "the model's own prefill read it, in a time that is not known"
    costs.observe_prompt(4, 1.9)
    assert [costs.round(n) for n in (3, 5)] == pytest.approx([1.9, 3.5]), "up to its width"
    costs.observe_prompt(11, 99.0)
    assert [costs.round(n) for n in (1, 5)] == [2.0, 6.0], "the first forward prepares much"
    costs.observe_prompt(11, 0.2)
    assert [costs.round(n) for n in (1, 5)] == [1.0, 1.0]
    assert costs.prefill == pytest.approx(9.0 + 1.9 + 99.0 + 0.2)


def test_drafts_that_are_made_at_once_cost_the_same_at_other_lengths():
    for at_once, seconds in ((True, (0.4, 0.4, 0.4)), (False, (0.1, 0.4, 0.8))):
        costs = Costs()
        costs.expect(0.1, at_once, False)
        costs.observe(0, 0, 0.0, 1.0)
        costs.observe(4, 4, 0.4, 1.0)
        assert [costs.round(n) - 1 for n in (1, 4, 8)] == pytest.approx(seconds)
        assert costs.trees(1, 4) == pytest.approx([1 + seconds[0]] * 5)
        assert costs.round(0) == 1
        assert len(costs.trees(1, 20)) == 2 * (1 + 4), "up to twice the widest forward"


# Of a target with hidden states of 32, and of three heads that draft 66 of its 67 tokens.
OUTPUTS = 3 * 66 * 32
BLOCKWISE = (32 * 6 + 6) + (6 * 96 + 96)


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", layers=4)


def size(module):
    return sum(x.numel() for x in module.parameters())


def costs_of(target, drafter, monkeypatch):
    """What schedule and benefit guard of a call begin with."""
    seen, start_from = [], Costs.start_from

    def recorded(self, *args, **kwargs):
        seen.append(self)
        start_from(self, *args, **kwargs)

    monkeypatch.setattr(Costs, "start_from", recorded)
    generate(target, **hf_models.prompts((9,)), drafter=drafter, max_new_tokens=1)
    return seen[0]


@pytest.mark.parametrize(
    ("name", "weights", "at_once", "reads_prompt"),
    [
        ("medusa", (2 * 3 * (32 * 32 + 32)) + OUTPUTS, True, False),
        ("blockwise", BLOCKWISE + OUTPUTS, True, False), ("pass_head", size, True, False),
        ("exit_head", lambda t: size(t) - size(t.model.layers[1:]) + (32 * 32 + 32), False, False),
        ("early_exit", lambda t: size(t) - size(t.model.layers[1:]), False, False),
        ("layer_skip", lambda t: size(t) - size(t.model.layers[1:2]), False, False),
        ("eagle3", lambda t: size(head_for(t)) + 66 * 32, False, True),
    ],
)  # fmt: skip
def test_a_draft_costs_the_weights_that_it_reads(
    name, weights, at_once, reads_prompt, target, monkeypatch, tmp_path
):
    costs = costs_of(target, drafter_proof.NAMED[name](target, tmp_path), monkeypatch)
    share = (weights(target) if callable(weights) else weights) / size(target)
    assert costs.relative_cost == pytest.approx(share)
    assert (costs.drafts_at_once, costs.reads_prompt) == (at_once, reads_prompt)


def test_each_pause_takes_twice_as_many_rounds():
    guard = BenefitGuard(max_loss=math.inf, window=2, pause=3)
    guard.observe(0, 1.0, 1.0)
    for rounds in (3, 6):
        assert guard.observe(3, 1.0, 2.0) is None
        assert guard.observe(3, 1.0, 2.0).endswith(f"drafting pauses for {rounds} rounds")
        for _ in range(rounds):
            assert guard.affordable(9, 3) == 0
            guard.observe(0, 1.0, 1.0)
        assert guard.affordable(9, 3) == 3
    even = BenefitGuard(max_loss=math.inf, window=2)
    for drafted in (0, 3, 3, 3, 3):
        assert even.observe(drafted, 1.0 + (drafted > 0), 1.0 + (drafted > 0)) is None
    paid = BenefitGuard(max_loss=math.inf, window=2)
    paid.start(Costs(), 32, trusted=True)  # in earlier calls
    paid.observe(0, 1.0, 1.0)
    assert [paid.observe(3, 1.0, 2.0) is None for _ in range(8)] == [True] * 7 + [False]
