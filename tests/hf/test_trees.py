"""Trees in the loop: every layout keeps greedy text; what processors, limits and rules see."""

from itertools import pairwise

import pytest
import torch
from specdec_hf import Draft, StatelessDrafter
from support import hf_models
from support.drafter_proof import TREE_KINDS, VOCAB, tree_drafters
from support.hf_models import NEW, PROCESSED, RAGGED, SAMPLED, run


@pytest.mark.covering(test=1)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, marks=pytest.mark.full if k in {"three models", "trie of models"} else [])
        for k in TREE_KINDS
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma2"])
def test_rules_without_acceptance_uniforms_equal_plain_decoding(name, kind):
    model, inputs = hf_models.tiny(name), hf_models.prompts(RAGGED)
    drafter, tree = tree_drafters(name)[kind]
    for rule, settings in (
        ("greedy", {"do_sample": False, "max_new_tokens": 12}),
        ("match", {**SAMPLED, "max_new_tokens": 8}),
        ("target_only", {**SAMPLED, "max_new_tokens": 8}),
    ):
        plain = run(model, inputs, rule="token" if rule == "target_only" else rule, **settings)
        got = run(model, inputs, drafter=drafter, tree=tree, rule=rule, **settings)
        assert got.sequences.tolist() == plain.sequences.tolist()
        torch.testing.assert_close(got.logprobs, plain.logprobs, rtol=1e-3, atol=1e-3)
        if rule == "greedy" and "lookup" not in kind:
            assert got.stats.accepted > 0, "a drafter that is never right proves little"


def test_a_sequence_does_not_depend_on_others_beyond_the_drafters_context():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((14, 6))
    drafter = hf_models.build("llama", context=16)
    kwargs = {"drafter": drafter, "tree": (2, 2), "rule": "multi_draft_wor", **SAMPLED}
    together = run(model, inputs, **{**kwargs, "seed": [4, 5]})
    alone = {key: value[1:, -6:] for key, value in inputs.items()}
    got = run(model, alone, **kwargs)
    assert together.sequences[1, -NEW:].tolist() == got.sequences[0, -NEW:].tolist()
    assert together.stats.sequences[1].drafted == got.stats.sequences[0].drafted > 0


def test_the_last_child_of_top_k_plus_one_may_be_any_other_token():
    model = hf_models.build("llama", vocab_size=VOCAB)
    settings = {"drafter": model, "tree": (VOCAB,), "rule": "top_k_plus_one"}
    out = hf_models.decode(model, do_sample=True, seed=1, top_k=0, **settings)
    assert {one.drafted[0] for one in out.stats.round_log} == {0, VOCAB}


def test_rule_auto_follows_drafter_and_layout():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    expected = {"eagle": "target_only", "trie of models": "multi_draft", "lookup": "target_only"}
    for kind in ("branching", "two models", *expected):
        drafter, tree = tree_drafters("llama")[kind]
        got = run(model, inputs, drafter=drafter, tree=tree, do_sample=True, max_new_tokens=3)
        assert got.stats.rule == expected.get(kind, "multi_draft_wor")
        assert got.stats.tree


def test_a_rule_of_the_users_own_rejects_the_children_of_the_node_that_it_accepted():
    tree = Draft(torch.tensor([[1, 1, 2, 3]]), torch.tensor([[-1, -1, 0, 1]]))  # two equal nodes
    twins = type("Twins", (StatelessDrafter,), {"size": 4, "depth": 2, "propose": lambda *_: tree})
    rounds, rule = [], lambda P, Q, tokens, uniforms, parents: ([1], P[2])
    settings = {"drafter": twins(), "rule": rule, "do_sample": True, "trace": rounds.append}
    run(hf_models.tiny("llama"), hf_models.prompts((9,)), seed=1, **settings)
    assert {(*traced.steps[0].rejected,) for traced in rounds[1:-1]} == {(3,)}


def test_trees_of_greedy_text_hold_the_most_likely_tokens_under_rule_match_too():
    """Also where all siblings but the first are drawn without replacement."""
    model, drafter = hf_models.tiny("llama"), hf_models.perturbed("llama", 0.3)
    runs = [
        run(model, hf_models.prompts((9,)), drafter=drafter, tree=(8, 2), rule=rule)
        for rule in ("greedy", "match")
    ]
    by_trial = [out.stats.acceptance_by_trial for out in runs]
    assert by_trial[0] == by_trial[1]
    assert max(by_trial[0][1:]) > 0
    given = {"do_sample": True, "temperature": [0.0, 0.7], "drafter": drafter, "tree": (8, 2)}
    mixed = run(model, hf_models.prompts((9, 9)), rule="match", **given)
    assert mixed.stats.sequences[0].acceptance_by_trial == by_trial[0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "branching"), ("llama", "eagle"), ("gpt2", "branching"), ("gpt2", "trie of all")],
)
def test_the_context_ends_trees(name, kind):
    """GPT-2 has a table of positions: nodes of the sequence that has ended are beyond it."""
    model = hf_models.build(name, context=32)
    drafter, tree = tree_drafters(name)[kind]
    got = run(model, hf_models.prompts((20, 26)), drafter=drafter, tree=tree, max_new_tokens=50)
    plain = run(model, hf_models.prompts((20, 26)), max_new_tokens=50)
    assert got.sequences.tolist() == plain.sequences.tolist()
    assert {one.stop_reason for one in got.stats.sequences} == {"context"}


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("case", PROCESSED)
@pytest.mark.parametrize("kind", ["branching", "trie of all"])
def test_logits_processors_see_the_path_to_each_node(case, kind):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    kwargs = {"max_new_tokens": 12, "pad_token_id": hf_models.PAD, **PROCESSED[case]}
    expected = model.generate(**inputs, do_sample=False, **kwargs)
    drafter, tree = tree_drafters("llama")[kind]
    got = run(model, inputs, drafter=drafter, tree=tree, **kwargs)
    assert got.sequences.tolist() == expected.tolist()


def grammar(columns, *steps):
    """Allows tokens that are so far after the last one, and fails after any other prefix."""

    def allowed(b, ids):
        generated = ids[columns:].tolist()
        if any((after - before) % 67 not in steps for before, after in pairwise(generated)):
            raise KeyError(f"no state after {generated}")
        return [(int(ids[-1]) + step) % 67 for step in steps]

    return {"prefix_allowed_tokens_fn": allowed, "seed": 3}


@pytest.mark.parametrize(("rule", "most"), [("traversal", 2), ("multi_draft", 4), ("k_seq", 4)])
def test_children_of_equal_siblings_are_counted_in_the_order_the_rule_tries_them(rule, most):
    """Siblings of a small vocabulary are often equal; only traversal keeps their children apart."""
    model, drafter = (hf_models.build("llama", seed=s, vocab_size=5) for s in (0, 1))
    inputs = hf_models.prompts((9, 9, 4, 6), vocab_size=5)
    out = run(
        model, inputs, drafter=drafter, tree=(2, 2), do_sample=True, rule=rule,
        seed=[1, 2, 3, 4], max_new_tokens=40,
    )  # fmt: skip
    assert len(out.stats.acceptance_by_trial) == most
    greedy = run(model, inputs, drafter=model, tree=(2, 2), rule=rule)
    assert greedy.stats.acceptance_by_trial[0] > 0.9
    if rule == "traversal":  # it merges equal siblings where it is greedy
        two = [hf_models.with_noise(model, 0.1), model]
        run(model, inputs, drafter=two, tree=(1, 1), rule=rule, max_new_tokens=40)


class Scattered(StatelessDrafter):
    """Drafts tokens that the grammar allows, then one that it forbids or an absent one."""

    name = "scattered"

    def propose(self, history, limits):
        last = torch.from_numpy(history.last(1))
        tokens = (last + torch.arange(1, limits.max() + 1)) % hf_models.VOCAB
        tokens[:, 2::3] = 5 if int(last[0]) % 2 else -1
        return Draft(tokens)


@pytest.mark.parametrize("lengths", [(9,), (9, 4)], ids=str)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_grammar_never_sees_a_forbidden_prefix(lengths, sampled):
    """Processors see only prefixes that plain decoding could have made, in chains and trees."""
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(lengths)
    tree = {"drafter": model, "tree": (8, 4), "rule": "target_only" if sampled else "auto"}
    for steps, drafts in (((1,), {"drafter": Scattered()}), ((1, 2), tree)):
        kwargs = {**grammar(9, *steps), "do_sample": sampled, "max_new_tokens": 20}
        plain = run(model, inputs, **kwargs)
        assert torch.equal(run(model, inputs, **drafts, **kwargs).sequences, plain.sequences)
