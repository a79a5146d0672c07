"""The schedule "optimal" and the benefit guard, on made-up machines whose times are formulas."""

import copy
import math

import numpy as np
import pytest
from specdec_hf import BenefitGuard, Drafter, generate
from specdec_hf.schedules.base import Outcome, ScheduleContext
from specdec_hf.schedules.costs import Costs
from specdec_hf.schedules.optimal import AcceptanceByPosition
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


def test_the_first_guess_is_not_far_from_what_was_measured():
    """One time alone says nothing of longer drafts, which would all seem to cost as much."""
    machine = Machine(0.9, 0.0, steep, number=3)
    machine.run(2)
    assert machine.lengths == [3, 6]


def test_acceptance_by_position_approaches_the_rates():
    acceptance = AcceptanceByPosition(3)
    assert acceptance.expected_tokens() == [1.0, 1.5, 1.75, 1.875]
    for _ in range(300):
        acceptance.observe(Outcome(np.array([3]), np.array([1]), np.array([True])))
    # Position 0 is always accepted, 1 never, and nothing is known of 2.
    assert acceptance.expected_tokens()[1:3] == pytest.approx([2.0, 2.0], abs=0.1)
    ended = AcceptanceByPosition(3)
    ended.observe(Outcome(np.array([3]), np.array([1]), np.array([False])))
    pairs = zip(ended.expected_tokens(), acceptance.expected_tokens(), strict=True)
    assert any(more > fewer for more, fewer in pairs)


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


@pytest.mark.parametrize("plain", [0.001, 0.5])
@pytest.mark.parametrize(("each", "first"), [(0.0, 16), (0.05, 13), (0.3, 2)])
def test_the_first_draft_is_as_long_as_the_machine_lets_it_be(each, first, plain):
    """Where each token adds so many plain rounds, 2 % of 32 of them and of the prompt's forward."""
    machine = Machine(
        0.0, 0.0, lambda n: plain * (1 + each * (n - 1)), schedule="constant", number=16
    )
    guarded(machine, BenefitGuard(max_loss=0.02), 32)
    assert next(filter(None, machine.lengths)) == first


def test_a_draft_model_reads_the_prompt_before_its_first_draft():
    """Half a second of the draft model's prefill is paid for by 25 seconds of plain decoding.

    A drafter over the target's cache does not pay for it.
    """
    rounds = []
    for reads_prompt in (True, False):
        guard, costs = (
            BenefitGuard(max_loss=0.02),
            Costs(relative_cost=0.5, reads_prompt=reads_prompt),
        )
        costs.observe_prompt(100, 1.0)
        guard.start(costs, 5000)
        costs.observe(0, 0, 0.0, 0.01)
        rounds.append(0)
        while not guard.affordable(rounds[-1], 1):
            guard.observe(0, 1.0, 0.01)
            rounds[-1] += 1
    draft = 0.5 * 0.01 + 0.01  # its step, and a token more in the target's forward
    assert rounds[0] == pytest.approx((0.5 + draft) / 0.02 / 0.01 - 100, abs=2)
    assert rounds[1] <= 1
    costs.observe(2, 2, 0.1, 0.2)  # of such a drafter, the first round is like all others
    assert costs.drafted


def test_a_round_drafts_as_much_as_the_account_can_lose():
    guard, costs = BenefitGuard(max_loss=0.02), Costs()
    guard.start(costs, 200)
    for tokens in (0, 8):
        costs.observe(tokens, tokens, 0.0, 1.0 + 0.25 * tokens)
    guard.observe(0, 1.0, 1.0)
    # 2 % of 32 plain rounds are .64 of one, and each token costs .25.
    assert [guard.affordable(1, length) for length in (1, 2, 3, 8)] == [1, 2, 2, 2]
    guard.observe(2, 1.0, 1.5)
    assert guard.affordable(2, 8) == 0, ".14 are left"


def test_every_token_of_a_draft_earns_what_may_be_lost():
    guard, costs = BenefitGuard(max_loss=0.02), Costs()
    guard.start(costs, 100)
    for tokens in (0, 4):
        costs.observe(tokens, tokens, 0.0, 1.0 + 0.25 * tokens)
    for _ in range(10):
        guard.observe(4, 5.0, 5.0)
    guard.observe(0, 1.0, 1.0)
    # 2 % of 51 plain rounds are 1.02 of one, and each token costs .25.
    assert guard.affordable(11, 8) == 4


def test_a_drafter_that_was_asked_in_vain_is_charged():
    guard = BenefitGuard(max_loss=0.02)
    costs = Costs()
    guard.start(costs, 5000)
    costs.observe(0, 0, 0.0, 1.0)
    for _ in range(100):
        guard.observe(0, 1.0, 1.0)
    assert guard.affordable(1, 1)
    guard.observe(0, 1.0, 3.0, in_vain=2.0)
    assert guard.plain_step == 1.0
    assert not guard.affordable(1, 1)


def test_a_guard_that_must_not_stop_only_reports():
    machine = Machine(0.1, 0.01, steep, schedule="constant")
    _, _, notes = guarded(machine, BenefitGuard(stops=False), 60)
    assert machine.lengths.count(0) == 1
    assert machine.lengths[5] == 0, "the plain round has a fixed number"
    assert "drafting goes on because the text must not depend on time" in notes[0]


@pytest.mark.parametrize(("budget", "times"), [(8, 4), (16, 4), (60, 4), (500, 0.512)])
def test_one_unlucky_round_does_not_end_the_drafts_of_a_trusted_drafter(budget, times):
    """It may lose as much as a text may that is several times as long, of at most 256 tokens."""
    costs = Costs()
    costs.observe(0, 0, 0.0, 1.0)
    costs.observe(5, 5, 0.0, 1.5)
    for trusted, horizon in ((True, times * budget), (False, min(budget, 32))):
        guard = BenefitGuard(max_loss=0.02)
        guard.start(costs, budget, trusted=trusted)
        guard.observe(0, 1.0, 1.0)
        spare = 0.02 * horizon - 0.1  # plain rounds, beside what one more token costs
        for slower, drafts in ((0.9, True), (1.1, False)):
            after = copy.deepcopy(guard)
            after.observe(5, 1.0, 1.0 + slower * spare)  # none of the draft was accepted
            assert bool(after.affordable(2, 1)) == drafts


def test_the_length_is_chosen_in_the_first_rounds_and_in_every_fourth():
    machine = Machine(0.8, 0.001, wide)
    speeds, chosen = machine.schedule.speeds, []
    machine.schedule.speeds = lambda: chosen.append(len(machine.lengths) + 1) or speeds()
    machine.run(32)
    assert chosen == [*range(2, 9), 12, 16, 20, 24, 28, 32], "the first round reads the prompt"
    for explored in (8, 16, 24):
        tried, *after = machine.lengths[explored : explored + 4]
        assert len(set(after)) == 1
        assert tried != after[0], "another length has one round"


# The guard by rounds of made-up seconds: what it measures, and when it pauses.


def guard_after(plain=1.0, **settings):
    """A guard that has seen a plain round."""
    guard = BenefitGuard(**{"max_loss": math.inf, **settings})
    guard.observe(0, 1.0, plain)
    return guard


def test_tokens_and_seconds_of_a_benefit_are_those_of_the_same_rounds():
    guard = guard_after(window=3)
    for tokens, seconds in [(4.0, 2.0)] * 4 + [(2.0, 1.0)] * 2:
        guard.observe(3, tokens, seconds)
    assert guard.benefit == pytest.approx((4 * 4.0 + 2 * 2.0) / 6 / 2.0), "it has won: all of them"
    guard.observe(3, 2.0, 20.0)
    assert guard.benefit == pytest.approx(2.0 / 1.0), "it has lost: the last three, and a median"


@pytest.mark.parametrize(("before", "after", "step"), [(5.0, 2.0, 2.0), (1.0, 5.0, 1.0)])
def test_a_plain_round_takes_the_lower_median_of_the_last_and_of_many(before, after, step):
    guard = guard_after(plain=before)
    for seconds in [before] * 5 + [after] * 3:
        guard.observe(0, 1.0, seconds)
    assert guard.plain_step == step


def test_each_pause_takes_twice_as_many_rounds():
    guard = guard_after(window=2, pause=3)
    for pauses, rounds in enumerate((3, 6), 1):
        assert guard.observe(3, 1.0, 2.0) is None
        assert guard.benefit == 0.5
        assert guard.observe(3, 1.0, 2.0).endswith(f"drafting pauses for {rounds} rounds")
        assert guard.stopped == pauses
        for _ in range(rounds):
            assert guard.pausing
            assert guard.affordable(9, 3) == 0
            guard.observe(0, 1.0, 1.0)
        assert not guard.pausing
        assert guard.affordable(9, 3) == 3


def test_a_measurement_after_a_pause_begins_anew():
    guard = guard_after(window=2, pause=1)
    for _ in range(2):
        guard.observe(3, 1.0, 2.0)
    guard.observe(0, 1.0, 1.0)
    guard.observe(3, 3.0, 2.0)
    assert guard.benefit == 1.5


def test_a_call_that_has_won_pauses_after_four_times_as_many_rounds():
    """Most rounds are slower than plain ones here, and a few save more than all others lose."""
    guard = guard_after(window=3)
    notes = [guard.observe(3, 1.5, seconds) for seconds in (0.1, 2.0, 2.0) * 4]
    assert notes[:-1] == [None] * 11
    assert "benefit 0.75" in notes[-1]


@pytest.mark.parametrize(("tokens", "drafts"), [(1.0, 4), (1.2, 16), (1.25, 40)])
def test_without_a_clear_benefit_a_plain_round_follows_half_a_window(tokens, drafts):
    """The window is 8 rounds, and 32 in a call that has won."""
    guard, made = guard_after(max_loss=0.02), 0
    while made < 40 and guard.affordable(made, 3):
        guard.observe(3, tokens, 1.0)
        made += 1
    assert made == drafts


def test_without_a_limit_half_a_window_is_drafted_before_the_first_plain_round():
    guard, made = BenefitGuard(max_loss=math.inf), 0
    while guard.affordable(made, 3):
        guard.observe(3, 1.0, 1.0)
        made += 1
    assert made == 4
    guard.observe(0, 1.0, 1.0)
    assert guard.affordable(made, 3) == 3


def test_a_draft_model_reads_the_prompt_once():
    guard, costs = BenefitGuard(max_loss=0.02), Costs(relative_cost=0.5)
    costs.prefill = 1.0  # half of it for the draft model
    guard.start(costs, 100)
    costs.observe(0, 0, 0.0, 1.0)
    guard.observe(0, 1.0, 1.0)
    for draft in (0.6, 0.1):
        costs.observe(1, 1, draft, 1.0)
    guard.observe(1, 1.0, 1.6)
    # Of 33 seconds 0.66 may be lost, 0.6 are, and a round costs 0.1 more than a plain one.
    assert guard.affordable(2, 1) == 0
    guard.observe(1, 2.0, 1.5)
    assert guard.affordable(3, 1) == 1


def test_before_a_plain_round_a_round_of_drafts_counts_as_one_that_takes_as_long():
    guard = BenefitGuard(window=1)
    guard.observe(3, 4.0, 1.0)
    guard.observe(0, 1.0, 1.0)
    guard.observe(3, 1.0, 1.0)
    assert guard.benefit == 2.5, "the call has won three rounds, so that more than the last counts"
