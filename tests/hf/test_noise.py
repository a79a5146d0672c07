"""The noise of custom drafters: exact, or refused, under rules that read the draft distribution.

A later round drafts again at the positions of drafts that were rejected. If it met the noise that
drew them again, and knew anything of them, its text would be biased, although nothing looks wrong.
Block and traversal decide by drafts after the one at which they stop, the rules of trees by
rejected siblings; under rule token it takes a drafter that remembers.
"""

import math

import numpy as np
import pytest
import torch
from specdec_hf import (
    Draft,
    Drafter,
    HorizontalCascade,
    ModelDrafter,
    NasdDrafter,
    RandomDrafter,
    SuffixAutomatonDrafter,
    TrieTree,
    VerticalCascade,
    generate,
)
from specdec_hf.drafters import cascade, merge
from specdec_hf.drafting import checks
from specdec_hf.drafting.sampling import RowSampler
from specdec_hf.loop import drafted
from support import hf_models
from support.drafter_proof import (
    GAMMA,
    LENGTH,
    PROMPTS,
    SIGNIFICANCE,
    VOCAB,
    context_of,
    joint_p_value,
    target,
)

import specdec_kernels as kernels

READING = (*kernels.RULES_READING_DRAFT, *kernels.TREE_RULES_READING_DRAFT)
PROMPT = torch.tensor(PROMPTS[:1])
TREE = TrieTree(depth=GAMMA)


class Markov(Drafter):
    """Draws each token from a row of a table, as an honest custom drafter would.

    Args:
        kind: "context" asks for the noise, "position" takes that of the token's own position, and
            "in vain" does so although it asks.
    """

    name = "markov"

    def __init__(self, kind):
        self.kind = kind
        self.table = 2.0 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))

    def start(self, context):
        self.context = context

    def row(self, history, i, last):
        """The logits [B, V] of draft i after the tokens ``last`` [B]."""
        return self.table[last % VOCAB]

    def positions(self, lengths, i):
        of_position = torch.from_numpy(lengths + i)
        if self.kind == "position":
            return of_position
        asked = self.context.noise_positions(lengths, i)
        return asked if self.kind == "context" else of_position

    def propose(self, history, limits):
        gamma = int(limits.max())
        tokens, rows, drawn = torch.from_numpy(history.last(1)), [], []
        for i in range(gamma):
            rows.append(self.row(history, i, tokens[:, -1]))
            drawn.append(
                kernels.sample(
                    rows[-1], seeds=self.context.seeds, positions=self.positions(history.lengths, i)
                )
            )
            tokens = torch.cat([tokens, drawn[-1].tokens[:, None]], dim=1)
        sums, thresholds = (
            torch.stack([getattr(one, name) for one in drawn], dim=1)
            for name in ("logsumexp", "threshold")
        )
        distribution = kernels.SampledDraft(torch.stack(rows, dim=1), sums, thresholds, 1.0)
        return Draft(tokens[:, 1:], distribution=distribution)


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

    def propose(self, history, limits):
        draft = super().propose(history, limits)
        self.rejected = history.lengths.copy(), draft.tokens
        return draft


def arguments(drafters, rule):
    """Chains of one drafter under rules of chains, else a trie of all of them."""
    if rule in kernels.RULES:
        return {"drafter": drafters[0], "rule": rule, "gamma": GAMMA}
    return {"drafter": drafters, "rule": rule, "gamma": None, "tree": TREE}


def call(drafters, rule, **kwargs):
    return generate(
        target()[0], PROMPT, **arguments(drafters, rule), do_sample=True, top_k=0, seed=0,
        max_new_tokens=LENGTH + GAMMA, return_dict_in_generate=True, **kwargs,
    )  # fmt: skip


# One rule represents all: that no noise is drawn with twice is tested exactly below. There are the
# fewer texts, the more the wrong noise biases those of a rule.
CASES = [
    pytest.param(Remembers, "token", 1, 4000, 2, marks=pytest.mark.full),
    pytest.param(Markov, "block", 1, 8000, 0, marks=pytest.mark.full),
    pytest.param(Markov, "traversal", 2, 3000, 2, marks=pytest.mark.full),
    (Markov, "multi_draft", 2, 2000, 2),
]


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize(("kind", "rule", "count", "texts", "prompt"), CASES)
def test_noise_of_the_context_gives_the_targets_distribution(
    kind, rule, count, texts, prompt, wrong
):
    """`wrong` takes that of positions, and hides it by asking in vain: a negative control."""
    drafters = [kind("in vain" if wrong else "context") for _ in range(count)]
    p_value = joint_p_value(**arguments(drafters, rule), texts=texts, prompt=prompt)
    assert (p_value < SIGNIFICANCE) == wrong


class AsksOnce(Markov):
    def positions(self, lengths, i):
        if lengths[0] == PROMPT.shape[1] + 1:
            return self.context.noise_positions(lengths, i)
        return torch.from_numpy(lengths + i)


class Deterministic(Drafter):
    def propose(self, history, limits):
        gamma = int(limits.max())
        return Draft(torch.arange(gamma).expand(len(history.lengths), -1) % VOCAB)


ASKED = r"must draw at positions from context.noise_positions\(history.lengths, i\) under rule"
REFUSED = {  # the rule, the drafters, and the message
    "token": ("token", ["position"], f"Markov.propose {ASKED} 'token', but did not ask for them"),
    "block": ("block", ["position"], f"Markov.propose {ASKED} 'block'"),
    "one of several": ("multi_draft", ["context", "position"], f"Markov.propose {ASKED} 'multi_d"),
    "asked once": ("block", [AsksOnce("context")], f"AsksOnce.propose {ASKED} 'block'"),
    "none": ("multi_draft", ["context", Deterministic()], "Deterministic.propose must return a di"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_noise_is_refused_by_name(case):
    rule, drafters, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call([Markov(one) if isinstance(one, str) else one for one in drafters], rule)


@pytest.mark.parametrize(
    ("drafter", "rules"),
    [
        (Deterministic(), ("block", "traversal", "multi_draft")),
        (Markov("position"), ("match", "target_only")),
    ],
    ids=["no distribution", "not read"],
)
def test_drafts_that_need_no_noise_of_the_context_are_taken(drafter, rules):
    for rule in rules:
        assert call([drafter], rule).stats.drafted > 0


@pytest.mark.parametrize("rule", ["match", "greedy", "target_only", *READING])
def test_noise_positions_are_those_of_the_ops(rule):
    context, lengths = context_of(None, rule, 2), np.array([10, 20])
    expected = kernels.draft_positions(torch.from_numpy(lengths), 3, rule=rule)
    assert torch.equal(context.noise_positions(lengths, range(3)), expected)
    for i in range(3):
        assert torch.equal(context.noise_positions(torch.tensor([10, 20]), i), expected[:, i])
    assert len(expected.flatten().unique()) == 6
    assert (expected[:, 0] == torch.tensor([10, 20])).all() == (rule == "match")


def test_noise_positions_of_trees_follow_number_or_depth():
    lengths = np.array([10, 20])
    assert context_of(None, "match", 2).noise_positions(lengths, [4, 5], depth=2).tolist() == [
        [11] * 2,
        [21] * 2,
    ]
    drawn = context_of(None, "multi_draft", 2).noise_positions(lengths, [4, 5], depth=2)
    assert (drawn - torch.tensor([[10], [20]]) >> 32).tolist() == [[5, 6]] * 2
    with pytest.raises(ValueError, match=r"index must be in \[0, 65536\), got -1"):
        context_of(None, "block", 2).noise_positions(lengths, -1)


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
    seen, sample_rows, limits_of = [], RowSampler.sample, {}

    def asking(drafter, history, limits, context):
        limits_of[id(context)] = limits
        return checks.ask(drafter, history, limits, context)

    for module in (drafted, cascade, merge):
        monkeypatch.setattr(module, "ask", asking)

    def spied(sampler, logits, positions, **kwargs):
        asked = limits_of[id(sampler.context)] > 0
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
    out = hf_models.decode(
        hf_models.tiny("llama"), (9, 1, 5), drafter=make(), rule=rule, do_sample=True, top_k=0,
        seed=[1, 2, 3], max_new_tokens=16, **kwargs,
    )  # fmt: skip
    assert out.stats.accepted < out.stats.drafted
    assert len(set(draws)) == len(draws) >= out.stats.drafted > 60


# A drafter that knows texts of earlier calls, and how it takes also those of the same seeds. Its
# matches are so long that a text is like no other one, nor like an earlier part of itself.
KEEPING = {
    "suffix_automaton": (
        lambda: SuffixAutomatonDrafter(min_match=6, keep=2**20), "_drawn_alike", lambda *_: set()
    ),
    "nasd": (
        lambda: NasdDrafter(6, 6, 0, max_kept=10**6), "_earlier_of", lambda one, *_: one._earlier
    ),
}  # fmt: skip
# Cells of the two uniforms that decide about the second token of a text: those of its acceptance
# and those that draw it. Each sum of probabilities, also of a residual, is an edge between cells.
PROBS, CELLS = (2 / 4, 1 / 4, 1 / 4, 0.0), (4, 12)


def with_cells(prompt_length):
    """`verify_chain` of a target with these probabilities, where the seed is the number of a cell.

    The first token of a text is always 0.
    """

    def verify(logits, tokens, draft, *, seeds, positions, **kwargs):
        uniforms = torch.full((len(tokens), tokens.shape[1] + 1), 0.3, dtype=torch.float64)
        second = positions == prompt_length + 1
        uniforms[second, 0] = ((seeds // CELLS[1] + 0.5) / CELLS[0])[second].double()
        uniforms[second, -1] = ((seeds % CELLS[1] + 0.5) / CELLS[1])[second].double()
        rows = torch.tensor(PROBS).log().expand_as(logits)
        return kernels.verify_chain(
            rows, tokens, draft, seeds=seeds, positions=positions, uniforms=uniforms, **kwargs
        )

    return verify


@pytest.mark.parametrize("takes_all", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize("name", KEEPING)
def test_no_draft_comes_from_a_text_that_the_same_noise_has_drawn(name, takes_all, monkeypatch):
    """The exact distribution of the second token of a second call, over all cells of its noise.

    A draft from the text of the first call tells the uniform that has drawn it. After its rejection
    that uniform draws from the residual: after a 0, which comes of a small one, always 1.
    """
    make, method, taking_all = KEEPING[name]
    drafter, count = make(), math.prod(CELLS)
    if takes_all:
        monkeypatch.setattr(type(drafter), method, taking_all)
    body = torch.cartesian_prod(*[torch.arange(3)] * 4)[:count]
    prompts = torch.cat([torch.full((count, 1), 3), body], dim=1)  # the target never emits a 3
    arguments = {
        "attention_mask": torch.ones_like(prompts), "drafter": drafter, "gamma": 1, "top_k": 0,
        "do_sample": True, "max_new_tokens": 3, "guard": False, "return_dict_in_generate": True,
    }  # fmt: skip

    def call(rule, first=0):
        return generate(
            target()[0], prompts, rule=rule, seed=[*range(first, first + count)], **arguments
        )

    with monkeypatch.context() as patch:
        patch.setattr(drafted, "verify_chain", with_cells(prompts.shape[1]))
        second = [call("token").sequences[:, -2].bincount(minlength=VOCAB) for _ in range(2)]
        out = call("token")
    assert second[0].tolist() == [24, 12, 12, 0]
    assert second[1].tolist() == ([18, 24, 6, 0] if takes_all else [24, 12, 12, 0])
    assert any("had the same seed" in note for note in out.stats.notes) != takes_all
    assert (out.stats.drafted > 0) == takes_all
    if takes_all:
        return
    for rule, first in (("match", 0), ("token", 10**6)):
        other = call(rule, first)
        assert not any("had the same seed" in note for note in other.stats.notes)
        assert other.stats.drafted > 0


class Knows(Drafter):
    """Drafts nothing, and remembers the seeds that its call has told it."""

    rolls_back = True

    def start(self, context):
        self.seeds = context.sampled_seeds()

    def propose(self, history, limits):
        return None


PLACES = {  # of a drafter in a call
    "alone": (lambda one: one, "token", {}),
    "horizontal": (lambda one: HorizontalCascade([one, "random"], [1]), "token", {}),
    "vertical": (lambda one: VerticalCascade(NEAR, one), "token", {}),
    "staged": (lambda one: VerticalCascade(NEAR, one), "multi_draft", {"tree": (2,)}),
    "trie": (lambda one: one, "target_only", {"tree": TREE}),
    "cascade in a trie": (
        lambda one: HorizontalCascade([one, "prompt_lookup"], [1]), "target_only", {"tree": TREE}
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_part_of_a_drafter_knows_the_seeds_of_the_call(place):
    """What it keeps of texts must not come with seeds of its own, or with none."""
    make, rule, kwargs = PLACES[place]
    knows = Knows()
    hf_models.decode(
        hf_models.tiny("llama"), (9, 1, 5), drafter=make(knows), rule=rule, do_sample=True,
        temperature=[1.0, 0.0, 0.5], seed=[7, 8, 9], max_new_tokens=4, **kwargs,
    )  # fmt: skip
    assert knows.seeds == {0: 7, 2: 9}
