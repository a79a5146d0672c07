"""The noise of custom drafters: exact, or refused, under rules that read the draft distribution.

A later round drafts again at the positions of drafts that were rejected. If it met the noise that
drew them again, and knew anything of them, its text would be biased, although nothing looks wrong.
Block and traversal decide by drafts after the one at which they stop, the rules of trees by
rejected siblings; under rule token it takes a drafter that remembers.
"""

import functools
import math

import numpy as np
import pytest
import torch
from specdec_hf import (
    BenefitGuard,
    Draft,
    DraftContext,
    Drafter,
    HorizontalCascade,
    ModelDrafter,
    RandomDrafter,
    TrieTree,
    VerticalCascade,
    generate,
)
from specdec_hf.drafters.row_sampler import RowSampler
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.providers import SIGNIFICANCE, chi_square

from specdec_kernels import (
    RULES_READING_DRAFT,
    TREE_RULES_READING_DRAFT,
    SampledDraft,
    draft_positions,
    sample,
)

VOCAB, LENGTH, GAMMA = 4, 4, 3
# The fewer, the more the wrong noise biases the texts of a rule.
TEXTS = {"token": 8000, "block": 8000, "traversal": 6000, "multi_draft": 4000}
READING = (*RULES_READING_DRAFT, *TREE_RULES_READING_DRAFT)
PROMPT = torch.tensor([[1, 2, 1]])
TREE = TrieTree(depth=GAMMA)


class Markov(Drafter):
    """Draws each token from a row of a table, as an honest custom drafter would.

    Args:
        kind: "context" asks for the noise, "position" takes that of the token's own position, "own"
            takes the random numbers of a generator.
        noise: what it declares.
    """

    name = "markov"

    def __init__(self, kind, noise="context"):
        self.kind, self.noise = kind, noise
        self.table = 2.0 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
        self.generator = torch.Generator().manual_seed(1)

    def start(self, context):
        self.context = context

    def row(self, history, i, last):
        """The logits [B, V] of draft i after the tokens ``last`` [B]."""
        return self.table[last % VOCAB]

    def positions(self, lengths, i):
        if self.kind == "context":
            return self.context.noise_positions(lengths, i)
        if self.kind == "position":
            return torch.from_numpy(lengths + i)
        return torch.randint(2**62, (len(lengths),), generator=self.generator)

    def propose(self, history, gamma):
        tokens, rows, drawn = torch.from_numpy(history.last(1)), [], []
        for i in range(gamma):
            rows.append(self.row(history, i, tokens[:, -1]))
            drawn.append(
                sample(
                    rows[-1],
                    seeds=self.context.seeds,
                    positions=self.positions(history.lengths, i),
                )
            )
            tokens = torch.cat([tokens, drawn[-1].tokens[:, None]], dim=1)
        sums, thresholds = (
            torch.stack([getattr(one, name) for one in drawn], dim=1)
            for name in ("logsumexp", "threshold")
        )
        distribution = SampledDraft(torch.stack(rows, dim=1), sums, thresholds, 1.0)
        return Draft(tokens[:, 1:], distribution)


class Remembers(Markov):
    """What it drafted for a position before, and was rejected, is likelier there now."""

    def start(self, context):
        super().start(context)
        self.rejected = None

    def row(self, history, i, last):
        rows = super().row(history, i, last)
        if self.rejected is not None:
            lengths, tokens = self.rejected
            at = torch.from_numpy(history.lengths - lengths + i)
            known = (at < tokens.shape[1]).nonzero()[:, 0]
            rows = rows.clone()
            rows[known, tokens[known, at[known]].clamp(min=0)] += 2.5
        return rows

    def propose(self, history, gamma):
        draft = super().propose(history, gamma)
        self.rejected = history.lengths.copy(), draft.tokens
        return draft


class LearnsFromCandidates(Remembers):
    """It learns of rejected drafts by what the loop tells it."""

    candidates = 1

    def propose(self, history, gamma):
        return Markov.propose(self, history, gamma)

    def observe(self, history, candidates):
        if candidates.tokens.shape[1] > 1:
            self.rejected = history.lengths.copy(), torch.from_numpy(candidates.tokens[:, 1:])


@functools.cache
def target():
    """The model, and the probabilities of the first tokens of its texts."""
    model = hf_models.build("llama", vocab_size=VOCAB)
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
    with torch.no_grad():
        logits = model(torch.cat([PROMPT.expand(len(texts), -1), texts], dim=1)).logits[:, 2:-1]
    logprobs = logits.double().log_softmax(dim=-1).gather(2, texts[..., None])[..., 0]
    return model, logprobs.sum(dim=1).exp()


def call(drafters, rule, texts=1, **kwargs):
    """Chains of one drafter under rules of chains, else a trie of all of them."""
    tree = {"drafter": drafters, "tree": TREE} if rule not in ("token", "block", "match") else {
        "drafter": drafters[0], "gamma": GAMMA
    }  # fmt: skip
    return generate(
        target()[0], PROMPT.expand(texts, -1), **tree, rule=rule, do_sample=True, top_k=0,
        seed=list(range(texts)), max_new_tokens=LENGTH + GAMMA, return_dict_in_generate=True,
        **kwargs,
    )  # fmt: skip


def p_value(drafters, rule, texts=None):
    texts = TEXTS[rule] if texts is None else texts
    out = call(drafters, rule, texts)
    assert out.stats.accepted > texts / 2
    first = out.sequences[:, PROMPT.shape[1] :][:, :LENGTH]
    codes = (first * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(dim=1)
    return chi_square(codes, target()[1])


CASES = [("block", 1), ("traversal", 2), ("multi_draft", 2)]
REMEMBERING = pytest.mark.parametrize("kind", [Remembers, LearnsFromCandidates])


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "count"), CASES)
def test_noise_of_the_context_gives_the_targets_distribution(rule, count):
    assert p_value([Markov("context") for _ in range(count)], rule) > SIGNIFICANCE


@pytest.mark.slow
def test_noise_that_is_the_drafters_own_gives_the_targets_distribution():
    assert p_value([Markov("own", "independent")], "block") > SIGNIFICANCE


@pytest.mark.slow
@REMEMBERING
def test_a_drafter_may_remember_what_was_rejected(kind):
    assert p_value([kind("context")], "token", texts=20_000) > 1e-3


@pytest.mark.slow
@REMEMBERING
def test_noise_of_positions_biases_rule_token_where_a_drafter_remembers(kind):
    """Negative control: the same drafter, which hides its noise by a wrong declaration."""
    assert p_value([kind("position", "independent")], "token") < SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "count"), CASES)
def test_noise_of_positions_is_biased_where_a_wrong_declaration_hides_it(rule, count):
    """Negative control: the very drafter that is refused when it declares nothing."""
    drafters = [Markov("position", "independent") for _ in range(count)]
    assert p_value(drafters, rule) < SIGNIFICANCE


@pytest.mark.parametrize(("rule", "count"), [("token", 1), *CASES])
def test_noise_of_positions_is_refused_by_name(rule, count):
    message = (
        rf"Markov.propose must draw at positions from context.noise_positions\(history.lengths, i\)"
        f" under rule '{rule}', but did not ask for them"
    )
    with pytest.raises(ValueError, match=message):
        call([Markov("position") for _ in range(count)], rule)


class AsksOnce(Markov):
    """Asks in its first round only."""

    def positions(self, lengths, i):
        if lengths[0] == PROMPT.shape[1] + 1:
            return self.context.noise_positions(lengths, i)
        return torch.from_numpy(lengths + i)


def test_a_drafter_asks_in_every_round():
    with pytest.raises(ValueError, match=r"AsksOnce.propose must draw at positions from context"):
        call([AsksOnce("context")], "block")


def test_one_of_several_drafters_is_refused():
    with pytest.raises(ValueError, match=r"Markov.propose must draw at positions from context"):
        call([ModelDrafter(target()[0]), Markov("position")], "multi_draft")


def test_an_unknown_declaration_is_named():
    with pytest.raises(ValueError, match=r"Markov.noise must be 'context' or 'indep"):
        call([Markov("context", "position")], "block")


class Deterministic(Drafter):
    """Drafts the same tokens in every round, with no distribution."""

    def propose(self, history, gamma):
        return Draft(torch.arange(gamma).expand(len(history.lengths), -1) % VOCAB)


@pytest.mark.parametrize("rule", ["block", "traversal", "multi_draft"])
def test_drafts_without_a_distribution_need_no_noise(rule):
    assert call([Deterministic()], rule).stats.drafted > 0


@pytest.mark.parametrize("rule", ["match", "target_only"])
def test_rules_that_do_not_read_the_distribution_ask_for_nothing(rule):
    assert call([Markov("position")], rule).stats.drafted > 0


def test_chains_of_a_trie_all_need_a_distribution_of_one_temperature():
    """Rows of a distribution were read for a chain without one."""
    with pytest.raises(ValueError, match=r"Deterministic.propose must return a distribution under"):
        call([Markov("context"), Deterministic()], "multi_draft")
    with pytest.raises(ValueError, match=r"Markov.propose must return a distribution of context.t"):
        call([Markov("context")], "multi_draft", temperature=0.5)


def context_for(rule, **kwargs):
    seeds = torch.zeros(2, dtype=torch.int64)
    return DraftContext(None, rule, 1.0, 0, 1.0, 0.0, seeds, 2, 99, 16, **kwargs)


@pytest.mark.parametrize("rule", ["match", "greedy", "target_only", *READING])
def test_noise_positions_are_those_of_the_ops(rule):
    context, lengths = context_for(rule), np.array([10, 20])
    expected = draft_positions(torch.from_numpy(lengths), 3, rule=rule)
    assert torch.equal(context.noise_positions(lengths, range(3)), expected)
    for i in range(3):
        assert torch.equal(context.noise_positions(torch.tensor([10, 20]), i), expected[:, i])
    assert len(expected.flatten().unique()) == 6
    assert (expected[:, 0] == torch.tensor([10, 20])).all() == (rule == "match")


def test_noise_positions_of_trees_follow_number_or_depth():
    lengths = np.array([10, 20])
    assert context_for("match").noise_positions(lengths, [4, 5], depth=2).tolist() == [
        [11] * 2,
        [21] * 2,
    ]
    drawn = context_for("multi_draft").noise_positions(lengths, [4, 5], depth=2)
    assert (drawn - torch.tensor([[10], [20]]) >> 32).tolist() == [[5, 6]] * 2
    with pytest.raises(ValueError, match=r"index must be in \[0, 65536\), got -1"):
        context_for("block").noise_positions(lengths, -1)


def test_chains_of_a_trie_share_no_noise():
    seen = []

    class Spy(Markov):
        def positions(self, lengths, i):
            seen.append(self.context.noise_positions(lengths, i))
            return seen[-1]

    call([Spy("context") for _ in range(3)], "multi_draft")
    assert len(torch.cat(seen).unique()) == len(seen) > 9


@pytest.fixture
def draws(monkeypatch):
    """(seed, position) of every draw for a sequence that can use drafts, cut ones included."""
    seen, sample_rows = [], RowSampler.sample

    def spied(sampler, logits, positions, **kwargs):
        asked = np.broadcast_to(sampler.context.limits, len(positions)) > 0
        for b in np.flatnonzero(asked):
            at = [(int(sampler.seeds[b]), position) for position in positions[b].tolist()]
            seen.extend(one for one in at if one[1])  # 0 where rows are measured and not drawn from
        return sample_rows(sampler, logits, positions, **kwargs)

    monkeypatch.setattr(RowSampler, "sample", spied)
    return seen


NEAR, FAR = (hf_models.perturbed("llama", amount) for amount in (0.1, 0.5))
DRAFTERS = {
    "model": (lambda: NEAR, "token", {}),
    "ngram": (lambda: "ngram:1", "token", {}),
    "vertical": (lambda: VerticalCascade(NEAR, FAR, 3), "token", {}),
    "horizontal": (lambda: HorizontalCascade([NEAR, FAR], [2]), "token", {}),
    "nested": (
        lambda: VerticalCascade(NEAR, HorizontalCascade([FAR, RandomDrafter()], [1])),
        "block",
        {},
    ),
    "tree": (lambda: NEAR, "multi_draft_wor", {"tree": (2, 2)}),
    "two models": (lambda: [NEAR, FAR], "multi_draft", {"tree": (2, 1)}),
    "trie": (lambda: [ModelDrafter(NEAR), ModelDrafter(FAR)], "traversal", {"tree": TREE}),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_draft_of_a_call_is_drawn_with_noise_of_another(name, draws):
    make, rule, kwargs = DRAFTERS[name]
    out = generate(
        hf_models.tiny("llama"), **hf_models.prompts((9, 1, 5)), drafter=make(), rule=rule,
        do_sample=True, top_k=0, seed=[1, 2, 3], max_new_tokens=24, guard=False,
        return_dict_in_generate=True, **kwargs,
    )  # fmt: skip
    assert out.stats.accepted < out.stats.drafted
    assert len(set(draws)) == len(draws) >= out.stats.drafted > 100


def test_a_pause_that_depends_on_drafts_draws_with_other_noise(draws):
    """The last draft decides how long the target takes, and so whether the next round drafts."""
    model, now = hf_models.build("llama", vocab_size=VOCAB), [0.0]

    def forward(module, args, kwargs):
        ids = kwargs["input_ids"]
        now[0] += 7.0 if ids.shape[1] > 1 and ids[0, -1] >= VOCAB // 2 else 1.0

    model.register_forward_pre_hook(forward, with_kwargs=True)
    out = generate(
        model, PROMPT, drafter="random", gamma=2, rule="token", do_sample=True, top_k=0, seed=0,
        clock=lambda: now[0], guard=BenefitGuard(max_loss=math.inf, window=1, pause=1),
        max_new_tokens=60, self_check=False, return_dict_in_generate=True,
    )  # fmt: skip
    assert out.stats.gammas[1:].count(0) > 5, "drafting pauses"
    assert len(set(draws)) == len(draws) == out.stats.drafted > 10


def test_positions_of_drafts_are_checked():
    with pytest.raises(ValueError, match=r"rule must be one of token, .*, got 'blok'"):
        draft_positions(torch.tensor([1]), 2, rule="blok")
    with pytest.raises(ValueError, match="number must be at least 0, got -1"):
        draft_positions(torch.tensor([1]), -1, rule="block")
