"""Trees in the loop: every drafter and layout keeps the text, or its distribution."""

import pytest
import torch
from hf.test_generate import NEW, RAGGED, SAMPLED, run
from specdec_hf import EagleTree, TreeSpec, TrieTree
from support import hf_models
from support.drafter_proof import assert_independent_of_batch
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.hf_trees import KINDS, drafters
from support.providers import SIGNIFICANCE, chi_square_of_counts

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(9,), RAGGED], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma2"])
def test_greedy_equals_model_generate(name, lengths, kind):
    model, inputs = hf_models.tiny(name), hf_models.prompts(lengths)
    drafter, tree = drafters(name)[kind]
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    got = run(model, inputs, drafter=drafter, tree=tree)
    torch.testing.assert_close(got.sequences, expected, rtol=0, atol=0)
    assert got.stats.rule == "greedy"
    if "lookup" not in kind:
        assert got.stats.accepted > 0, "a drafter that is never right proves little"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rules_without_acceptance_uniforms_equal_plain_sampling(name, kind):
    """Rules match and target_only draw the target's token whatever the tree is."""
    model, inputs = hf_models.tiny(name), hf_models.prompts(RAGGED)
    drafter, tree = drafters(name)[kind]
    for rule, alone in (("match", "match"), ("target_only", "token")):
        plain = run(model, inputs, rule=alone, **SAMPLED)
        got = run(model, inputs, drafter=drafter, tree=tree, rule=rule, **SAMPLED)
        torch.testing.assert_close(got.sequences, plain.sequences, rtol=0, atol=0)
        torch.testing.assert_close(got.logprobs, plain.logprobs, rtol=1e-3, atol=1e-3)


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
    ("branching", "multi_draft"),
    ("branching", "top_k_plus_one"),
    ("branching", "k_seq"),
    ("branching", "traversal"),
    ("two models", "multi_draft_wor"),
    ("two models", "traversal"),
    ("trie of models", "multi_draft"),
    ("eagle", "target_only"),
]


@pytest.mark.parametrize(("kind", "rule"), SAMPLED_RULES)
def test_a_sequence_does_not_depend_on_its_batch(kind, rule):
    drafter, tree = drafters("llama")[kind]
    stats = assert_independent_of_batch(
        lambda: drafter, hf_models.tiny("llama"), NEW, **{**SAMPLED, "rule": rule, "tree": tree}
    )
    assert stats.rule == rule
    assert stats.accepted > 0


@pytest.mark.parametrize(
    ("tree", "rule"),
    [(None, "block"), ((2, 2), "multi_draft_wor"), (TrieTree(depth=4), "traversal")],
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


DISTRIBUTION_CASES = [
    (None, "block"),
    ((2, 2), "multi_draft_wor"),
    ((2, 2), "multi_draft"),
    ((3, 2), "top_k_plus_one"),
    ((2, 2), "k_seq"),
    ((2, 2), "traversal"),
    ((2, 2), "target_only"),
    ((2, 2), "match"),
    (EagleTree(2, 3, 5), "target_only"),
    ("two", "multi_draft_wor"),
    ("two", "traversal"),
    ("trie", "multi_draft"),
]


def text_p_value(tree, rule, temperature=1.3, texts=3000):
    """Chi-square p-value of the first three tokens of many texts under the target."""
    tokens, sampling = 6, {"temperature": temperature, "top_k": 5}
    model = hf_models.build("llama", vocab_size=tokens)
    small = [hf_models.build("llama", vocab_size=tokens, seed=seed) for seed in (1, 2)]
    drafter = small if tree in ("two", "trie") else small[0]
    layout = {"two": (2, 1), "trie": TrieTree(depth=2)}.get(tree, tree)
    prompt = torch.tensor([[1, 4, 2]])
    prefixes = torch.cartesian_prod(*[torch.arange(tokens)] * 2)
    with torch.no_grad():
        logits = model(torch.cat([prompt.expand(len(prefixes), -1), prefixes], dim=1)).logits
    logits = logits[:, -3:].double() / sampling["temperature"]
    bound = logits.topk(sampling["top_k"], dim=-1).values[..., -1:]
    target_probs = logits.masked_fill(logits < bound, -torch.inf).softmax(dim=-1)
    first, second, third = target_probs.unbind(dim=1)
    here = torch.arange(len(prefixes))
    exact = (first[here, prefixes[:, 0]] * second[here, prefixes[:, 1]])[:, None] * third
    got = run(
        model,
        {"input_ids": prompt.expand(texts, -1), "attention_mask": torch.ones(texts, 3, dtype=int)},
        drafter=drafter, tree=layout, gamma=None if layout else 4, rule=rule,
        do_sample=True, seed=list(range(texts)), max_new_tokens=4, **sampling,
    )  # fmt: skip
    assert got.stats.accepted > 0
    a, b, c = got.sequences[:, 3:6].unbind(dim=1)
    seen = torch.bincount((a * tokens + b) * tokens + c, minlength=tokens**3)
    expected = exact.flatten() * texts
    assert not seen[expected == 0].any()
    likely = expected >= 5
    cells = torch.cat([expected[likely], expected[~likely].sum()[None]])
    counts = torch.cat([seen[likely], seen[~likely].sum()[None]])
    return chi_square_of_counts(counts.numpy(), cells.numpy() * texts / cells.sum().item())


@pytest.mark.parametrize(("tree", "rule"), DISTRIBUTION_CASES, ids=str)
def test_the_distribution_of_the_text_is_the_targets(tree, rule):
    assert text_p_value(tree, rule) > SIGNIFICANCE


@pytest.mark.parametrize(("rule", "temperature"), [("multi_draft_wor", 3), ("top_k_plus_one", 0.4)])
def test_children_are_drawn_at_the_temperature_that_they_are_verified_at(rule, temperature):
    """Near temperature 1 the difference is too small to be seen in this many texts."""
    assert text_p_value((3, 2), rule, temperature, texts=2000) > SIGNIFICANCE


@pytest.mark.parametrize("rule", ["multi_draft", "traversal"])
def test_noise_that_depends_on_the_position_alone_is_detected(rule, monkeypatch):
    """Negative control: siblings share their noise, and the next round draws with it again."""

    def shared(self, children):
        self.draft.context.asked_for_noise = True
        return (self.start[:, None] + self.depth - 1).expand(-1, len(children))

    monkeypatch.setattr("specdec_hf.drafters.trees.children._Level.noise_positions", shared)
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
    for rule in ("multi_draft_wor", "multi_draft", "top_k_plus_one", "k_seq", "traversal"):
        mixed = run(
            model, inputs, drafter=hf_models.perturbed("llama"), tree=(3, 2), do_sample=True,
            seed=5, temperature=[0.0, 0.7], top_k=[0, 20], rule=rule,
        )  # fmt: skip
        assert mixed.sequences[0].tolist() == greedy[0].tolist()
        assert mixed.stats.sequences[0].accepted > 0
