"""Schedules in the loop: same text, same distribution, what they record, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from proofs.toy_chain import ToyChain, assert_target_distribution, assert_wrong_distribution
from specdec_hf import ModelDrafter, PromptLookupDrafter
from specdec_hf.drafting.call import Asks
from specdec_hf.schedules.base import Schedule, ScheduleContext, TokenStats
from specdec_hf.schedules.registry import SCHEDULES, make_schedule
from support import hf_models
from support.drafter_proof import assert_independent_of_batch, with_states

NEW = 16
READING = [name for name in SCHEDULES if make_schedule(name).reads_token_stats]
CHANGED = {"confidence": "confidence:threshold=0.2", "egag": "egag:gamma_max=8,beta=0.5"}


def call(schedule, lengths=(9,), **kwargs):
    return hf_models.decode(
        hf_models.tiny("llama"), lengths,
        num_assistant_tokens_schedule=CHANGED.get(schedule, schedule),
        **{"max_new_tokens": NEW, "drafter": hf_models.perturbed("llama"), **kwargs},
    )  # fmt: skip


def sampled(schedule, lengths=(9,), **kwargs):
    return call(schedule, lengths, **{"do_sample": True, "seed": 5, "top_k": 0, **kwargs})


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("lengths", [(9,), (9, 4, 12)], ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_greedy_text_under_every_schedule_is_that_of_plain_generation(name, lengths):
    inputs = hf_models.prompts(lengths)
    plain = hf_models.tiny("llama").generate(**inputs, max_new_tokens=NEW, do_sample=False)
    out = call(name, lengths)
    assert out.sequences.tolist() == plain.tolist()
    assert out.stats.accepted > 0


@pytest.mark.parametrize("name", READING)
def test_rule_match_shares_its_noise_with_the_drafter(name):
    """A drafter that equals the target is always accepted, however short its drafts are."""
    greedy = call(name, (9, 4), drafter=hf_models.tiny("llama"))
    sample = sampled(name, rule="match", drafter=hf_models.tiny("llama"))
    assert greedy.stats.draft_acceptance_rate == sample.stats.draft_acceptance_rate == 1.0
    if name != "confidence_tuned":  # it learns that no draft need end early
        assert len({n for record in greedy.stats.round_log for n in record.drafted}) > 1


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("rule", ["token", "block", "match"])
@pytest.mark.parametrize("name", ["heuristic", "confidence_tuned", "egag"])
def test_seeds_repeat_the_text_alone_and_in_a_batch(name, rule):
    stats = assert_independent_of_batch(
        lambda: hf_models.perturbed("llama"), hf_models.tiny("llama"), drafts=False, rule=rule,
        num_assistant_tokens_schedule=CHANGED.get(name, name), top_k=0,
    )  # fmt: skip
    assert not any("depends" in note for note in stats.notes)


@pytest.mark.parametrize("on", ["timing", "rest of the batch"])
def test_a_text_that_depends_on_more_than_its_seed_has_a_note(on):
    stats = [sampled("optimal", (9, 4), rule=rule).stats for rule in ("token", "match")]
    assert any(on in note for note in stats[0].notes)
    for one in (stats[1], call("optimal", (9, 4)).stats):
        assert not any("depends" in note for note in one.notes)


def test_only_schedules_that_read_token_statistics_cost_reads():
    constant, reading = call("constant"), call("confidence")
    assert constant.stats.device_reads == constant.stats.rounds
    drafted = [max(record.drafted) for record in reading.stats.round_log]
    assert reading.stats.device_reads == reading.stats.rounds + sum(drafted)


def test_optimal_chooses_the_depth_of_trees():
    inputs = hf_models.prompts((9, 4))
    plain = hf_models.tiny("llama").generate(**inputs, max_new_tokens=40, do_sample=False)
    out = call("optimal", (9, 4), tree=(2, 1, 1), max_new_tokens=40)
    assert out.sequences.tolist() == plain.tolist()
    assert set(out.stats.gammas) <= {0, 2, 4, 6}
    out = call("optimal:max_length=2", (9, 4), tree=(2, 1, 1), max_new_tokens=40)
    assert max(out.stats.gammas) == 4


class Confident(PromptLookupDrafter):
    """Prompt lookup whose confidence falls by a fifth a token."""

    reports_confidence = True

    def begin(self, call):
        return hf_models.told(super().begin(call), self.confident)

    def confident(self, texts, draft):
        if draft is not None:
            draft.confidence = self.confidence(draft.tokens.shape)
        return draft

    @staticmethod
    def confidence(shape):
        return np.tile(0.8 ** np.arange(1, shape[1] + 1), (shape[0], 1))


def test_a_confidence_cuts_copied_drafts():
    out = call("confidence:threshold=0.5", drafter=Confident(), max_new_tokens=24)
    drafted = {n for record in out.stats.round_log for n in record.drafted if n}
    assert max(drafted) == 3, "0.8, 0.64 and 0.512 are at least 0.5"


@pytest.mark.parametrize("name", READING)
def test_schedules_refuse_drafters_without_the_statistics_that_they_read(name):
    message = f"schedule '{name}' needs a drafter with a draft distribution or a confidence"
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        call(name, drafter="prompt_lookup")


@pytest.mark.parametrize(
    ("confidence", "error", "message"),
    [
        (lambda shape: [[0.5]], TypeError, "confidence as an array of floats, got list"),
        (lambda shape: np.ones(shape, int), TypeError, "confidence as an array of floats, got int"),
        (lambda shape: np.ones(3), ValueError, r"confidence \[1, 4\], got \[3\]"),
    ],
    ids=["list", "integers", "shape"],
)
def test_a_wrong_confidence_is_refused_by_name(confidence, error, message):
    drafter = Confident()
    drafter.confidence = confidence
    with pytest.raises(error, match=f"Confident.propose must return {message}"):
        call("confidence", drafter=drafter, max_new_tokens=24)


def whole(inner, reports):
    """A drafter that draws whole drafts from another one's model, and asks no schedule."""

    def change(state, call):
        asks_nothing = inner.begin(replace(call, asks=Asks()))

        def at_once(texts, limits):
            draft = asks_nothing.propose(texts, limits)
            if reports:  # one that tells even tokens from odd ones
                draft.confidence = (draft.tokens % 2).numpy().astype(np.float32)
            return draft

        state.propose, state.commit = at_once, asks_nothing.commit

    made = with_states(inner, change)
    made.reports_confidence = reports
    return made


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", ["confidence", "specdec++", "egag"])
def test_drafts_that_are_made_at_once_are_cut_where_stepping_ends_them(name, rule, reports):
    stepped = sampled(name, (9, 4), rule=rule)
    model = ModelDrafter(hf_models.perturbed("llama"))
    cut = sampled(name, (9, 4), rule=rule, drafter=whole(model, reports))
    assert cut.sequences.tolist() == stepped.sequences.tolist()


def test_the_threshold_of_transformers_is_honoured():
    own = call("confidence:threshold=0.2").stats
    for given in (None, "constant"):
        honoured = call(given, assistant_confidence_threshold=0.2).stats
        assert honoured.gammas == own.gammas
    with pytest.raises(ValueError, match="threshold and num_assistant_tokens_schedule='egag'"):
        call("egag", assistant_confidence_threshold=0.2)


class Alternates(Schedule):
    def lengths(self, most):
        self.number = 3 - getattr(self, "number", 1)
        return np.minimum(most, self.number)

    def observe(self, outcome):
        seen.append(outcome.drafted.tolist())


seen = []


def test_a_schedule_of_the_users_own():
    """It learns how much each sequence drafted, also after one has ended."""
    schedule = Alternates()
    texts = call(None, (9, 4)).sequences[:, 9:].tolist()
    ends = next(token for token in texts[0][4:] if token not in texts[0][:4] + texts[1])
    seen.clear()
    out = call(schedule, (9, 4), eos_token_id=ends)
    assert out.stats.gammas[:5] == [0, 2, 1, 2, 1]
    assert seen == [record.drafted for record in out.stats.round_log[1:]]
    assert [0, 2] in seen
    assert vars(schedule) == {}, "the loop uses a copy"


V, GAMMA = 3, 3
ENDING = {
    "confidence": "confidence:threshold=0.45",
    "specdec++": "specdec++:h=0.6",
    "egag": "egag:gamma_max=3",
}


def stats_of(toy, drafts):
    """The statistics of each position of draft tuples [N, gamma], every tuple a sequence."""
    out = []
    for i in range(toy.gamma):
        row = toy.draft_probs[i][tuple(drafts[:, :i].T)] if i else toy.draft_probs[0]
        row = row.expand(len(drafts), -1)
        probability = row.gather(1, drafts[:, i : i + 1])[:, 0]
        entropy = torch.special.entr(row).sum(dim=1)
        out.append(TokenStats(probability.float().numpy(), entropy.float().numpy()))
    return out


def kept_lengths(toy, name, drafts, *, drawn=True, confidence=False):
    """[N] how much of each draft tuple a schedule keeps."""
    stats = stats_of(toy, drafts)
    if confidence:
        stats = [TokenStats.of_confidence(one.probability) for one in stats]
    schedule, most = make_schedule(ENDING[name]), np.full(len(drafts), GAMMA)
    schedule.start(ScheduleContext(len(drafts), GAMMA, V))
    schedule.lengths(most)
    return torch.from_numpy(schedule.cut(stats, most, drawn=drawn))


def realized(toy, name, **kwargs):
    verify = toy.verifier("cpp")
    tuples = torch.cartesian_prod(*[torch.arange(V)] * GAMMA)
    kept = kept_lengths(toy, name, tuples, **kwargs)
    assert (kept < GAMMA).any(), "the schedule never ends a draft"

    def run(drafts, uniforms):
        lengths = kept[(drafts * V ** torch.arange(GAMMA - 1, -1, -1)).sum(1)]
        ended = torch.arange(GAMMA) >= lengths[:, None]
        return verify(drafts.masked_fill(ended, -1), uniforms)

    return toy.realized_by(run)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("confidence", [False, True])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", ENDING)
def test_ending_a_draft_keeps_the_targets_distribution(name, rule, confidence):
    toy = ToyChain(V, GAMMA, rule=rule, seed=3)
    assert_target_distribution(realized(toy, name, confidence=confidence), toy)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", ["confidence", "specdec++"])
def test_thresholds_as_llama_cpp_reads_them_are_biased(name, rule):
    """The control: they drop the token that ends the draft, which suits greedy text only."""
    toy = ToyChain(V, GAMMA, rule=rule, seed=3)
    assert_wrong_distribution(realized(toy, name, drawn=False), toy)
