"""The replay of greedy texts counts what the loop counts; the speed of the suffix automaton."""

import pytest
from specdec_hf import PromptLookupDrafter, SuffixAutomatonDrafter, TrieTree, generate
from specdec_hf.drafters.merge import TrieDrafter
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here

from bench.drafter_acceptance import Text, drafters, replay

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
