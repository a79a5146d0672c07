"""The replay of greedy texts counts what the loop counts; the speed of the suffix automaton."""

import numpy as np
import pytest
from specdec_hf import PromptLookupDrafter, SuffixAutomatonDrafter, TrieTree, generate
from specdec_hf.drafters.trees.trie import TrieDrafter
from specdec_host import Corpus
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here

from bench.drafter_acceptance import Text, choose, drafters, replay
from bench.suffix_automaton import LIMIT, markov_text, steps

pytestmark = pytest.mark.build

GAMMA, NEW = 4, 60


def both():
    return [SuffixAutomatonDrafter(min_match=1), PromptLookupDrafter(4, 1)]


@pytest.mark.parametrize("tree", [None, TrieTree(2, GAMMA)], ids=["chain", "trie"])
def test_a_replay_has_the_rounds_and_drafts_of_the_loop(tree):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    settings = {"drafter": both()[0], "gamma": GAMMA} if tree is None else {"drafter": both()}
    out = generate(
        model, **inputs, **settings, tree=tree, max_new_tokens=NEW, do_sample=False, guard=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    text = Text("", out.sequences[0].tolist(), 9)
    drafter = both()[0] if tree is None else TrieDrafter(both(), tree)
    counts = replay(drafter, text, model, GAMMA)
    assert counts.rounds == out.stats.rounds
    assert counts.accepted == out.stats.accepted > 0
    assert counts.drafted == out.stats.drafted
    assert counts.tokens_per_round == out.stats.mean_acceptance_length


def test_every_compared_drafter_replays():
    text = Text("", [1, 2, 3, 4] * 6, 8)
    for name, drafter in drafters(3).items():
        counts = replay(drafter, text, hf_models.tiny("llama"), 3)
        assert counts.tokens_per_round > 3, name


def test_prompts_are_chosen_by_category():
    class Prompt:
        def __init__(self, category):
            self.category = category

    prompts = [Prompt(c) for c in "aaabab"]
    chosen = choose(prompts, 2, lambda prompt: prompt is not prompts[0])
    assert [prompts.index(p) for p in chosen] == [1, 2, 3, 5]


def test_a_step_of_the_suffix_automaton_takes_at_most_50_microseconds():
    """The median at 8,000 tokens; bench/suffix_automaton.py also has a corpus of 1,000,000."""
    corpus = Corpus(markov_text(100_000, seed=0))
    us = steps(markov_text(10_000, seed=1), 8000, corpus, 4, 300)
    assert np.median(us[:, 0]) <= LIMIT
    # Of a long run of one token, only the counts of short suffixes may be raised.
    us = steps(np.zeros(60_000, dtype=np.int64), 50_000, None, 1, 300)
    assert np.median(us[:, 0]) <= LIMIT
