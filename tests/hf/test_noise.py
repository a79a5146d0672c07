"""The noise of drafts: exact under rules that read the draft distribution.

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
    DrafterCall,
    Drawn,
    ModelDrafter,
    StatelessDrafter,
    SuffixAutomatonDrafter,
    TrieTree,
    generate,
)
from specdec_hf.drafters import copying, merge
from specdec_hf.drafting import checks
from specdec_hf.loop import drafted
from specdec_papers import cascade, nasd
from specdec_papers.cascade import HorizontalCascade
from specdec_papers.nasd import NasdDrafter
from specdec_papers.ngram import RandomDrafter
from specdec_papers.vertical_cascade import VerticalCascade
from support import hf_models
from support.drafter_proof import (
    GAMMA,
    LENGTH,
    PROMPTS,
    SIGNIFICANCE,
    VOCAB,
    call_of,
    history_of,
    joint_p_value,
    target,
)

import specdec_kernels as kernels

READING = (*kernels.RULES_READING_DRAFT, *kernels.TREE_RULES_READING_DRAFT)
PROMPT = torch.tensor(PROMPTS[:1])
TREE = TrieTree(depth=GAMMA)


class Markov(StatelessDrafter):
    """Draws each token from a row of a table; a wrong one with the noise of its position."""

    name = "markov"

    def __init__(self, wrong=False):
        self.wrong = wrong
        self.table = 2.0 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))

    def begin(self, call):
        self.call = call
        return self

    def row(self, texts, i, last):
        """The logits [B, V] of draft i after the tokens ``last`` [B]."""
        return self.table[last % VOCAB]

    def draw(self, texts, rows, i):
        """The draft i, drawn from rows [B, V]."""
        if not self.wrong:
            return self.call.draw(texts, rows[:, None], i)
        at = torch.from_numpy(texts.lengths + i)
        found = kernels.sample(rows, seeds=self.call.seeds, positions=at)
        columns = (found.tokens, rows, found.logsumexp, found.threshold)
        return Drawn(*(x[:, None] for x in columns))

    def propose(self, texts, limits):
        tokens, drawn = torch.from_numpy(texts.last(1)), []
        for i in range(int(limits.max())):
            drawn.append(self.draw(texts, self.row(texts, i, tokens[:, -1]), i))
            tokens = torch.cat([tokens, drawn[-1].tokens], dim=1)
        return Draft(tokens[:, 1:], drawn=Drawn.join(drawn, tokens.device))


class Remembers(Markov):
    """What it drafted for a position before, and was rejected, is likelier there now."""

    def begin(self, call):
        self.rejected = None
        return super().begin(call)

    def row(self, texts, i, last):
        rows = super().row(texts, i, last)
        if self.rejected is not None:
            lengths, tokens = self.rejected
            at = torch.from_numpy(texts.lengths - lengths + i)
            known = (at < tokens.shape[1]).nonzero()[:, 0]
            rows = rows.clone()
            rows[known, tokens[known, at[known]].clamp(min=0)] += 2.5
        return rows

    def propose(self, texts, limits):
        draft = super().propose(texts, limits)
        self.rejected = texts.lengths.copy(), draft.tokens
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
def test_noise_of_the_round_gives_the_targets_distribution(kind, rule, count, texts, prompt, wrong):
    """`wrong` takes that of positions: a negative control."""
    drafters = [kind(wrong) for _ in range(count)]
    p_value = joint_p_value(**arguments(drafters, rule), texts=texts, prompt=prompt)
    assert (p_value < SIGNIFICANCE) == wrong


class Deterministic(StatelessDrafter):
    def propose(self, texts, limits):
        return Draft(torch.arange(limits.max()).expand(len(limits), -1) % VOCAB)


class DrawsAgain(Markov):
    def draw(self, texts, rows, i):
        return super().draw(texts, rows, 0)


class DrawsByItself(Markov):
    def propose(self, texts, limits):
        draft = super().propose(texts, limits)
        draft.drawn = draft.drawn.at(1.0)
        return draft


REFUSED = {
    "DrawsByItself.propose must return drawn as None or what call.draw returned": DrawsByItself(),
    "Deterministic.propose must return a di": Deterministic(),
    r"index must be another one for each draft of a round, .* got \[0\] after": DrawsAgain(),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_was_not_drawn_by_the_call_is_refused_by_name(message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call([Markov(), REFUSED[message]], "multi_draft")


@pytest.mark.parametrize("rule", ["block", "traversal", "multi_draft"])
def test_drafts_that_are_not_drawn_are_taken(rule):
    assert call([Deterministic()], rule).stats.drafted > 0


def uniforms_of(told, index, **where):
    """[B, m], tokens drawn behind 10 and 20 from rows that tell one uniform from another."""
    texts = history_of([1] * 10, [1] * 20)
    return told.draw(texts, torch.zeros(2, np.size(index), 2**20), index, **where).tokens


def at_positions(told, positions):
    rows, seeds = (
        torch.zeros(positions.numel(), 2**20),
        told.seeds.repeat_interleave(len(positions[0])),
    )
    noise = "shared" if told.rule == "match" else "draft"
    drawn = kernels.sample(rows, seeds=seeds, positions=positions.flatten(), noise=noise)
    return drawn.tokens.view_as(positions)


@pytest.mark.parametrize("rule", ["match", "greedy", "target_only", *READING])
def test_draws_have_the_noise_of_the_ops_positions(rule):
    told = call_of(None, rule, 2, temperature=1.0)
    positions = kernels.draft_positions(torch.tensor([10, 20]), 3, rule=rule)
    assert torch.equal(uniforms_of(told, range(3)), at_positions(told, positions))
    for i in range(3):
        assert torch.equal(uniforms_of(told, i), at_positions(told, positions[:, i : i + 1]))
    assert len(positions.flatten().unique()) == 6
    assert (positions[:, 0] == torch.tensor([10, 20])).all() == (rule == "match")


def test_the_noise_of_trees_follows_number_or_depth():
    told, lengths = call_of(None, "match", 2), torch.tensor([[10], [20]])
    found = uniforms_of(told, [4, 5], depth=2)
    assert torch.equal(found, at_positions(told, (lengths + 1).expand(-1, 2)))
    told = call_of(None, "multi_draft", 2)
    found = uniforms_of(told, [4, 5], depth=2)
    assert torch.equal(found, at_positions(told, lengths + (torch.tensor([5, 6]) << 32)))


@pytest.mark.parametrize("index", [-1, 2**16, 0.5, [3, 3]])
def test_a_wrong_index_is_refused(index):
    with pytest.raises(ValueError, match=r"^index must be (integers in \[0, 65536\)|another one)"):
        uniforms_of(call_of(None, "block", 2), index)
    with pytest.raises(ValueError, match=r"^logits must be \[2, 1, V\], a row for each index, got"):
        call_of(None, "block", 2).draw(history_of([1], [2]), torch.zeros(2, 3, 4), 0)


@pytest.fixture
def draws(monkeypatch):
    """(seed, position) of every draw for a sequence that can use drafts, cut ones included."""
    seen, positions_of, limits_of = [], {}, {}

    def asking(drafter, state, texts, limits, told):
        limits_of[id(told)] = limits
        return checks.propose_checked(drafter, state, texts, limits, told)

    for module in (drafted, cascade, merge):
        monkeypatch.setattr(module, "propose_checked", asking)

    def spying(kind):
        positions_of[kind] = kind._noise_positions

        def spied(told, *given):
            found = positions_of[kind](told, *given)
            for b in np.flatnonzero(limits_of[id(told)] > 0):
                seen.extend((int(told.seeds[b]), position) for position in found[b].tolist())
            return found

        monkeypatch.setattr(kind, "_noise_positions", spied)

    spying(DrafterCall)
    spying(cascade.LevelCall)
    return seen


def test_chains_of_a_trie_share_no_noise(draws):
    call([Markov() for _ in range(3)], "multi_draft")
    assert len(set(draws)) == len(draws) > 9


NEAR, FAR = (hf_models.perturbed("llama", amount) for amount in (0.1, 0.5))
BELOW = VerticalCascade(FAR, HorizontalCascade([FAR, RandomDrafter()], [1]), 3)
DRAFTERS = {
    "model": (lambda: NEAR, "token", {}),
    "ngram": (lambda: "ngram:1", "token", {}),
    "vertical": (lambda: VerticalCascade(NEAR, FAR, 3), "token", {}),
    "horizontal": (lambda: HorizontalCascade([NEAR, FAR], [2]), "token", {}),
    "nested": (lambda: HorizontalCascade([NEAR, VerticalCascade(FAR, BELOW, 2)], [1]), "block", {}),
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
        lambda: SuffixAutomatonDrafter(min_match=6, keep=2**20),
        copying._AutomatonState, "_drawn_alike", lambda *_: set(),
    ),
    "nasd": (
        lambda: NasdDrafter(6, 6, 0, max_kept=10**6), nasd._NasdState, "_earlier_of_each",
        lambda one, call: [one.drafter.kept.of(one._vocab_size)[0]] * call.batch_size,
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
    make, state, method, taking_all = KEEPING[name]
    drafter, count = make(), math.prod(CELLS)
    if takes_all:
        monkeypatch.setattr(state, method, taking_all)
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


class Knows(StatelessDrafter):
    """Drafts nothing, and remembers the seeds that its call has told it."""

    rolls_back = True

    def begin(self, call):
        self.seeds = call.sampled_seeds()
        return self

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
