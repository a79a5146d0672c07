"""Trees in the loop: every drafter and layout keeps the text, or its distribution."""

import pytest
import torch
from hf.test_generate import NEW, RAGGED, SAMPLED, run
from specdec_hf import TreeSpec, TrieTree
from support import hf_models
from support.drafter_proof import VOCAB, assert_independent_of_batch, joint_p_value
from support.hf_trees import KINDS, drafters
from support.providers import SIGNIFICANCE


@pytest.mark.covering(test=1)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, marks=pytest.mark.full if k in {"three models", "trie of models"} else [])
        for k in KINDS
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma2"])
def test_rules_without_acceptance_uniforms_equal_plain_decoding(name, kind):
    """Greedy, match and target_only take the target's token whatever the tree is."""
    model, inputs = hf_models.tiny(name), hf_models.prompts(RAGGED)
    drafter, tree = drafters(name)[kind]
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


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("lengths", [(9,), RAGGED], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_traversal_of_a_chain_is_rule_block(name, lengths):
    model, inputs = hf_models.tiny(name), hf_models.prompts(lengths)
    drafter = hf_models.perturbed(name)
    block = run(model, inputs, drafter=drafter, gamma=4, rule="block", **SAMPLED)
    for tree in (TreeSpec.chain(4), TrieTree(depth=4)):
        got = run(model, inputs, drafter=drafter, tree=tree, rule="traversal", **SAMPLED)
        assert got.sequences.tolist() == block.sequences.tolist()
        assert got.stats.accepted == block.stats.accepted > 0


SAMPLED_RULES = [
    ("branching", "multi_draft_wor"),
    pytest.param("branching", "top_k_plus_one", marks=pytest.mark.full),
    pytest.param("branching", "k_seq", marks=pytest.mark.full),
    pytest.param("branching", "traversal", marks=pytest.mark.full),
    ("two models", "traversal"),
    ("trie of models", "multi_draft"),
]


@pytest.mark.parametrize(("kind", "rule"), SAMPLED_RULES)
def test_a_sequence_does_not_depend_on_its_batch(kind, rule):
    drafter, tree = drafters("llama")[kind]
    stats = assert_independent_of_batch(
        lambda: drafter, hf_models.tiny("llama"), 12, **{**SAMPLED, "rule": rule, "tree": tree}
    )
    assert stats.rule == rule
    assert stats.accepted > 0


@pytest.mark.parametrize(
    ("tree", "rule"),
    [
        pytest.param(None, "block", marks=pytest.mark.full),
        ((2, 2), "multi_draft_wor"),
        pytest.param(TrieTree(depth=4), "traversal", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_sequence_does_not_depend_on_others_beyond_the_drafters_context(tree, rule):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((14, 6))
    drafter = hf_models.build("llama", context=16)
    kwargs = {"drafter": drafter, "tree": tree, "rule": rule, **SAMPLED}
    together = run(model, inputs, **{**kwargs, "seed": [4, 5]})
    alone = {key: value[1:, -6:] for key, value in inputs.items()}
    got = run(model, alone, **kwargs)
    assert together.sequences[1, -NEW:].tolist() == got.sequences[0, -NEW:].tolist()
    assert together.stats.sequences[1].drafted == got.stats.sequences[0].drafted > 0


# Rules target_only and match give the text of plain sampling itself, as tested above. The rules
# differ in their ops, whose distributions are exact, and share the loop.
DISTRIBUTION_CASES = [
    ("two", "traversal", 1.3),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            # near 1, children of another temperature could go unseen
            ((3, 2), "multi_draft_wor", 3.0),
            ((2, 2), "multi_draft", 1.3),
            ((3, 2), "top_k_plus_one", 0.4),
            ((2, 2), "k_seq", 1.3),
            ((2, 2), "traversal", 1.3),
        )
    ),
]


def text_p_value(tree, rule, temperature=1.3, texts=1000):
    small = [hf_models.build("llama", vocab_size=VOCAB, seed=seed) for seed in (1, 2)]
    drafter, layout = (small, (2, 1)) if tree == "two" else (small[0], tree)
    return joint_p_value(
        drafter, rule, texts=texts, temperature=temperature, top_k=3, gamma=None, tree=layout
    )


@pytest.mark.parametrize(("tree", "rule", "temperature"), DISTRIBUTION_CASES, ids=str)
def test_the_distribution_of_the_text_is_the_targets(tree, rule, temperature):
    assert text_p_value(tree, rule, temperature) > SIGNIFICANCE


@pytest.mark.parametrize("rule", ["traversal", pytest.param("multi_draft", marks=pytest.mark.full)])
def test_noise_that_depends_on_the_position_alone_is_detected(rule, monkeypatch):
    """Negative control: siblings share their noise, and the next round draws with it again."""

    def shared(self, children):
        self.draft.context.asked_for_noise = True
        return (self.start[:, None] + self.depth - 1).expand(-1, len(children))

    monkeypatch.setattr("specdec_hf.drafters.tree_model._Level.noise_positions", shared)
    assert text_p_value((2, 2), rule) < SIGNIFICANCE


def test_rule_auto_follows_drafter_and_layout():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    expected = {"eagle": "target_only", "trie of models": "multi_draft", "lookup": "target_only"}
    for kind in ("branching", "two models", *expected):
        drafter, tree = drafters("llama")[kind]
        got = run(model, inputs, drafter=drafter, tree=tree, do_sample=True, max_new_tokens=3)
        assert got.stats.rule == expected.get(kind, "multi_draft_wor")
        assert got.stats.tree


def test_sequences_of_temperature_0_in_a_sampled_batch_are_greedy():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 9))
    inputs["input_ids"][1] = inputs["input_ids"][0]
    greedy = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    for rule in ("multi_draft_wor", "traversal"):
        mixed = run(
            model, inputs, drafter=hf_models.perturbed("llama"), tree=(3, 2), do_sample=True,
            seed=5, temperature=[0.0, 0.7], top_k=[0, 20], rule=rule,
        )  # fmt: skip
        assert mixed.sequences[0].tolist() == greedy[0].tolist()
        assert mixed.stats.sequences[0].accepted > 0
