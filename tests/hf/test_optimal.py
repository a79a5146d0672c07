"""The schedule "optimal" and the benefit guard, on made-up machines whose times are formulas."""

import math

import numpy as np
import pytest
from specdec_hf import BenefitGuard, Drafter, generate
from specdec_hf.schedules.base import Outcome, ScheduleContext
from specdec_hf.schedules.costs import Costs
from specdec_hf.schedules.registry import make_schedule
from support import hf_models


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
    """16 tokens cost 1.2 forwards of one."""
    return 0.01 * (1 + 0.2 * (n - 1) / 15)


def jump(n):
    """Two tokens cost much more than one, and further ones little, as on a processor."""
    return 0.0053 if n == 1 else 0.0080 + 0.0002 * n


def steep(n):
    """6 tokens cost 1.6 forwards of one."""
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
    """Negative control: a guard that only pauses, as ``max_loss=inf`` does."""
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


class Knows(Drafter):
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


def test_a_guard_that_must_not_stop_only_reports():
    machine = Machine(0.1, 0.01, steep, schedule="constant")
    _, _, notes = guarded(machine, BenefitGuard(stops=False), 60)
    assert machine.lengths.count(0) == 1
    assert machine.lengths[5] == 0, "the plain round has a fixed number"
    assert "drafting goes on because the text must not depend on time" in notes[0]
