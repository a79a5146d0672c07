"""Trees of a draft model whose nodes a smaller drafter guesses: the same by fewer forwards."""

import copy
from contextlib import contextmanager

import pytest
from specdec_hf import HorizontalCascade, ModelDrafter, TreeSpec, VerticalCascade, generate
from specdec_hf.drafters.ngram import RandomDrafter
from support import hf_models
from support.cli_models import folder, invoke, one_line_error, says  # noqa: F401

TREE = TreeSpec.branching((2, 2, 1, 1))
RULES = (
    "greedy", "target_only", "match", "multi_draft", "multi_draft_wor", "top_k_plus_one", "k_seq",
    "traversal",
)  # fmt: skip


@contextmanager
def counted_forwards(model):
    """How many forwards the model makes, in a list of one number."""
    count = [0]

    def add(module, args, output):
        count[0] += 1

    hook = model.register_forward_hook(add)
    yield count
    hook.remove()


def draft_model():
    return copy.deepcopy(hf_models.with_noise(hf_models.tiny("llama"), 0.2))


def decoded(drafter, model, rule, lengths=(9, 4, 12), tree=TREE, new_tokens=14):
    """The output of a ragged batch, and the forwards of the draft model."""
    sampled = rule != "greedy"
    with counted_forwards(model) as count:
        out = generate(
            hf_models.tiny("llama"), **hf_models.prompts(lengths), drafter=drafter, tree=tree,
            rule=rule, do_sample=sampled, seed=3, max_new_tokens=new_tokens, guard=False,
            return_dict_in_generate=True,
        )  # fmt: skip
    return out, count[0]


def outcomes(stats):
    """What was drafted and kept in each round."""
    return [(one.drafted, one.accepted, one.emitted) for one in stats.round_log]


GUESSERS = {
    "itself": ModelDrafter,
    "less": lambda model: hf_models.with_noise(model, 0.3),
    "random": lambda model: RandomDrafter(),
    "copied": lambda model: "prompt_lookup",
    "cascade": lambda model: VerticalCascade(hf_models.with_noise(model, 0.3), "prompt_lookup"),
    "horizontal": lambda model: HorizontalCascade([copy.deepcopy(model), "prompt_lookup"], [1]),
}


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("guesser", GUESSERS)
@pytest.mark.parametrize("rule", RULES)
def test_guesses_change_no_tree_and_save_forwards(rule, guesser):
    model = draft_model()
    expected, forwards = decoded(model, model, rule)
    staged = VerticalCascade(model, GUESSERS[guesser](copy.deepcopy(model)), 3)
    found, fewer = decoded(staged, model, rule)
    assert found.sequences.equal(expected.sequences)
    assert outcomes(found.stats) == outcomes(expected.stats)
    assert 0 < found.stats.accepted < found.stats.drafted
    if guesser == "itself" and rule in ("greedy", "target_only", "match"):
        assert fewer < forwards, "a drawn child is guessed at times only"
    assert fewer <= forwards, "a guess is never a forward of its own"


def test_a_level_whose_nodes_were_guessed_needs_no_forward():
    """A guesser that is right: one forward a round. The control guesses at random."""
    model, chain = draft_model(), TreeSpec.branching((1, 1, 1, 1))
    arguments = {"rule": "greedy", "lengths": (9,), "tree": chain, "new_tokens": 24}
    _, alone = decoded(model, model, **arguments)
    right = VerticalCascade(model, ModelDrafter(copy.deepcopy(model)), 3)
    out, forwards = decoded(right, model, **arguments)
    rounds = sum(one.drafted[0] > 0 for one in out.stats.round_log)
    assert forwards == rounds > 3
    wrong = VerticalCascade(model, RandomDrafter(), 3)
    assert decoded(wrong, model, **arguments)[1] > 0.9 * alone > 2 * rounds
    two = VerticalCascade(model, ModelDrafter(copy.deepcopy(model)), 2)
    assert rounds < decoded(two, model, **arguments)[1] < alone


def test_guesses_are_made_below_every_new_node():
    """In a tree of two children at two levels, only those below the second are a new forward."""
    model = draft_model()
    right = VerticalCascade(model, ModelDrafter(copy.deepcopy(model)), 3)
    out, forwards = decoded(right, model, "greedy", lengths=(9,), new_tokens=24)
    # By the nodes of a round, whose tree is cut where the text ends: levels with new nodes.
    needed = {0: 0, 2: 1, 6: 2, 10: 3, 14: 3}
    assert forwards == sum(needed[one.drafted[0]] for one in out.stats.round_log)


def test_several_draft_models_may_be_staged():
    model = draft_model()
    other = hf_models.with_noise(model, 0.3)
    tree = TreeSpec.branching((1, 1, 1))
    expected, _ = decoded([model, other], model, "multi_draft", tree=tree)
    staged = VerticalCascade(model, "prompt_lookup")
    found, _ = decoded([staged, other], model, "multi_draft", tree=tree)
    assert found.sequences.equal(expected.sequences)
    assert outcomes(found.stats) == outcomes(expected.stats)
    with pytest.raises(ValueError, match="drafter must hold an object once, got one VerticalCas"):
        decoded([staged, staged], model, "multi_draft", tree=tree)


def test_a_cascade_near_the_end_of_its_context_drafts_what_fits():
    model = copy.deepcopy(hf_models.with_noise(hf_models.build("llama", context=20), 0.0))
    staged = VerticalCascade(model, ModelDrafter(copy.deepcopy(model)), 3)
    plain = hf_models.decode(hf_models.tiny("llama"), max_new_tokens=24)
    found, _ = decoded(staged, model, "greedy", lengths=(9,), new_tokens=24)
    assert found.sequences.equal(plain.sequences)
    assert found.stats.drafted > 0


def test_names_and_models_of_a_cascade_are_checked():
    model = hf_models.tiny("llama")
    assert VerticalCascade(model, "prompt_lookup").drafters[0].name == "prompt_lookup"
    with pytest.raises(ValueError, match="a cascade must hold drafters with a name, got 'magic'"):
        VerticalCascade(model, "magic")
    with pytest.raises(ValueError, match=r"must set rolls_back = True .* got NgramDrafter"):
        VerticalCascade(model, "ngram")
    with pytest.raises(TypeError, match="names of drafters and draft models, got int"):
        VerticalCascade(model, 3)


# The command line.


@pytest.mark.parametrize(
    "more",
    [
        ("vertical",), ("vertical", "--tree", "2,1,1"), ("horizontal:2",),
        ("vertical", "--temperature", "0.8", "--seed", "1"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_cascades_of_the_command_line_draft(more, folder):  # noqa: F811
    result = invoke(
        "generate", "--model", folder, "--prompt", "ab ab ab", "--max-new-tokens", 8,
        "--drafter", "layers:1", "--drafter", "prompt_lookup", "--cascade", *more, "--guard", "off",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "draft" in result.output


@pytest.mark.parametrize(
    ("drafters", "more", "message"),
    [
        (["prompt_lookup"], ["vertical"], "--cascade needs several --drafter, the largest"),
        (["layers:1", "random"], ["deep"], "--cascade must be one of vertical, horizontal, got 'd"),
        (["random", "prompt_lookup"], ["vertical"], "--cascade vertical needs draft models, such "),
        (["layers:1", "auto"], ["vertical"], "--cascade needs drafters of chains of their"),
        (["layers:1", "early_exit:1"], ["vertical"], "--cascade needs drafters of chains of their"),
        (["layers:1", "none"], ["vertical"], "--cascade needs drafters of chains of their"),
        (["layers:1", "random"], ["vertical:2"], "--cascade vertical takes no numbers, got"),
        (["layers:1", "random"], ["horizontal"], "--cascade must be horizontal:N,N with tokens to"),
        (["layers:1", "random"], ["horizontal:2,2"], "--cascade horizontal needs a number for"),
        (["layers:1", "random"], ["horizontal:2", "--tree", "2,1"], "--tree must not be given"),
        (["layers:1", "ngram"], ["vertical"], "--cascade vertical: drafter must set rolls"),
        (["layers:1,top_k=2", "random"], ["vertical"], "--cascade vertical: top_k of a model must"),
        (
            ["layers:1", "prompt_lookup"],
            ["horizontal:2", "--num-assistant-tokens-schedule", "egag"],
            "egag needs a drafter with a draft distribution",
        ),
    ],
)  # fmt: skip
def test_a_wrong_cascade_gets_one_line(drafters, more, message, folder):  # noqa: F811
    given = [word for name in drafters for word in ("--drafter", name)]
    line = one_line_error(
        "generate", "--model", folder, "--prompt", "ab", *given, "--cascade", *more
    )
    assert message in line


def test_a_table_in_a_cascade_does_not_learn(folder, tmp_path):  # noqa: F811
    text, table = tmp_path / "text", tmp_path / "table"
    text.write_text("ab ab ab ba ab")
    result = invoke("build", "ngram", text, "--model", folder, "--output", table)
    assert result.exit_code == 0, result.output
    result = invoke(
        "generate", "--model", folder, "--prompt", "ab ab", "--max-new-tokens", 6,
        "--drafter", "layers:1", "--drafter", f"ngram:{table}", "--cascade", "vertical",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert not says(result, "was not checked")
