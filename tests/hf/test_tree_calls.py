"""Trees in the loop: stops, caches, processors, streams, statistics and refusals."""

from itertools import pairwise

import pytest
from hf.test_generate import NEW, RAGGED, EndsWith, run
from hf.test_hf_arguments import PROCESSED
from specdec_hf import EagleTree, SpeculativeDecoder, TreeSpec, generate
from support import hf_models
from support.hf_trees import drafters
from transformers import StoppingCriteriaList


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("new_tokens", [1, 2, 3])
@pytest.mark.parametrize("kind", ["branching", "eagle", "trie of models"])
def test_max_new_tokens_is_exact(kind, new_tokens):
    model, inputs = hf_models.tiny("gemma2"), hf_models.prompts(RAGGED)
    drafter, tree = drafters("gemma2")[kind]
    expected = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    got = run(model, inputs, drafter=drafter, tree=tree, max_new_tokens=new_tokens)
    assert got.sequences.tolist() == expected.tolist()
    assert {one.stop_reason for one in got.stats.sequences} == {"length"}
    # The round of the prompt drafts no tree, and the last token is never drafted.
    assert all(one.drafted == 0 for one in got.stats.sequences) == (new_tokens <= 2)


@pytest.mark.parametrize("kind", ["two models", "trie of all"])
def test_end_of_sequence_inside_a_tree_ends_the_text(kind):
    model, inputs = hf_models.tiny("gemma2"), hf_models.prompts(RAGGED)
    drafter, tree = drafters("gemma2")[kind]
    free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[:, -NEW:]
    for at in (2, 5):
        ends = [int(free[0, at]), int(free[-1, at + 4])]
        kwargs = {"max_new_tokens": NEW, "eos_token_id": ends, "pad_token_id": hf_models.PAD}
        expected = model.generate(**inputs, do_sample=False, **kwargs)
        got = run(model, inputs, drafter=drafter, tree=tree, **kwargs)
        assert got.sequences.tolist() == expected.tolist()


def test_custom_stopping_criteria_see_every_prefix_once():
    model, inputs = hf_models.tiny("gpt2"), hf_models.prompts((9,))
    free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, -NEW:].tolist()
    mine, theirs = EndsWith(free[6:8]), EndsWith(free[6:8])
    kwargs = {"max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(**inputs, **kwargs, stopping_criteria=StoppingCriteriaList([theirs]))
    got = run(
        model, inputs, drafter=hf_models.perturbed("gpt2"), tree=(2, 2),
        stopping_criteria=StoppingCriteriaList([mine]),
    )  # fmt: skip
    assert got.sequences.tolist() == expected.tolist()
    assert mine.lengths == theirs.lengths


@pytest.mark.parametrize("kind", ["branching", "eagle", "trie of all"])
def test_the_context_ends_generation(kind):
    model = hf_models.build("llama", context=32)
    drafter, tree = drafters("llama")[kind]
    got = run(
        model, hf_models.prompts((20, 26)), drafter=drafter, tree=tree, max_new_tokens=50
    )  # fmt: skip
    plain = run(model, hf_models.prompts((20, 26)), max_new_tokens=50)
    assert got.sequences.tolist() == plain.sequences.tolist()
    assert {one.stop_reason for one in got.stats.sequences} == {"context"}


@pytest.mark.parametrize(
    "kind",
    ["other architecture", pytest.param("bfloat16", marks=pytest.mark.full), "short context"],
)
def test_a_drafter_unlike_the_target_changes_nothing(kind):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 4))
    drafter = hf_models.unlike(kind)
    expected = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    for one, tree in ((drafter, (2, 2)), (drafter, EagleTree(3, 3))):
        got = run(model, inputs, drafter=one, tree=tree, max_new_tokens=24)
        assert got.sequences.tolist() == expected.tolist()
        assert got.stats.accepted > 0 or kind != "bfloat16"
        if kind == "short context" and one is drafter:
            assert 0 in got.stats.gammas


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("case", PROCESSED)
@pytest.mark.parametrize("kind", ["branching", "trie of all"])
def test_logits_processors_see_the_path_to_each_node(case, kind):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    kwargs = {"max_new_tokens": 12, "pad_token_id": hf_models.PAD, **PROCESSED[case]}
    expected = model.generate(**inputs, do_sample=False, **kwargs)
    drafter, tree = drafters("llama")[kind]
    got = run(model, inputs, drafter=drafter, tree=tree, **kwargs)
    assert got.sequences.tolist() == expected.tolist()


def test_a_grammar_never_sees_a_forbidden_path():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 4))
    columns = inputs["input_ids"].shape[1]

    def allowed(b, ids):
        generated = ids[columns:].tolist()
        if any((after - before) % 67 not in (1, 2) for before, after in pairwise(generated)):
            raise KeyError(f"no state after {generated}")
        return [(int(ids[-1]) + 1) % 67, (int(ids[-1]) + 2) % 67]

    kwargs = {
        "do_sample": True, "prefix_allowed_tokens_fn": allowed, "seed": 3, "max_new_tokens": 12,
    }  # fmt: skip
    plain = run(model, inputs, **kwargs)
    got = run(
        model, inputs, drafter=model, tree=(8, 4), rule="target_only", **kwargs
    )  # fmt: skip
    assert got.sequences.tolist() == plain.sequences.tolist()


def test_the_returned_cache_continues_in_plain_generate():
    for name in ("gemma2",):
        model, inputs = hf_models.tiny(name), hf_models.prompts(RAGGED)
        whole = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        drafter, tree = drafters(name)["two models"]
        first = run(model, inputs, drafter=drafter, tree=tree, max_new_tokens=7)
        again = run(
            model,
            {"input_ids": first.sequences, "attention_mask": first.attention_mask},
            past_key_values=first.past_key_values,
            drafter=drafter,
            tree=tree,
            max_new_tokens=NEW - 7,
        )
        assert again.sequences.tolist() == whole.tolist()
        rest = model.generate(
            first.sequences, attention_mask=first.attention_mask,
            past_key_values=first.past_key_values, max_new_tokens=NEW - 7, do_sample=False,
        )  # fmt: skip
        assert rest.tolist() == whole.tolist()


def test_a_call_makes_one_forward_of_the_target_a_round():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    drafter, tree = drafters("llama")["branching"]
    run(model, inputs, drafter=drafter, tree=tree)  # checks the model
    forwards = []
    handle = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    out = run(model, inputs, drafter=drafter, tree=tree)
    handle.remove()
    assert len(forwards) == out.stats.rounds
    assert out.stats.accepted > 0


def test_streams_and_custom_generate_equal_generate():
    model, inputs = hf_models.tiny("gemma2"), hf_models.prompts(RAGGED)
    drafter, tree = drafters("gemma2")["branching"]
    decoder = SpeculativeDecoder(drafter, tree=tree, seed=4)
    kwargs = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.7, "top_k": 0}
    direct = generate(model, **inputs, **kwargs, drafter=drafter, tree=tree, seed=4)
    hooked = model.generate(**inputs, **kwargs, custom_generate=decoder)
    assert hooked.tolist() == direct.tolist()
    streamed = [[] for _ in RAGGED]
    kinds = set()
    for step in decoder.stream(model, **inputs, **kwargs):
        streamed[step.sequence] += step.tokens
        kinds |= set(step.kinds)
        assert step.kinds[-1] != "plain" or len(step.tokens) == 1
    assert streamed == direct[:, -NEW:].tolist()
    assert {"accepted", "recovered", "bonus"} <= kinds


def test_a_perfect_drafter_is_always_accepted():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 4))
    for rule in ("greedy", "multi_draft_wor", "traversal"):
        out = run(
            model, inputs, drafter=model, tree=(2, 1, 1), do_sample=rule != "greedy", seed=2,
            rule=rule, temperature=0.8, top_k=0, max_new_tokens=25,
        )  # fmt: skip
        assert out.stats.mean_acceptance_length > 3.5
        assert out.stats.acceptance_by_trial[0] > 0.9
        assert out.stats.acceptance_by_position[0] > 0.9
        assert out.stats.draft_acceptance_rate == pytest.approx(0.5, abs=0.06)


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


def test_equal_siblings_of_two_models_are_two_trials():
    """Two of three tokens from each model: at least one token is drafted twice."""
    model, *drafters = (hf_models.build("llama", seed=s, vocab_size=3) for s in (0, 1, 2))
    out = run(
        model, hf_models.prompts((9,), vocab_size=3), drafter=drafters, tree=(2,), do_sample=True,
        rule="multi_draft_wor", seed=1, max_new_tokens=60,
    )  # fmt: skip
    assert len(out.stats.acceptance_by_trial) == 4


def refused():
    """What is given in place of `tree=(2,)` and a draft model, or beside them, and the message."""
    model = hf_models.perturbed("llama")
    lenient = {"rule": "lenient", "lenience": 0.5, "do_sample": True}
    k_seq = {"drafter": [model] * 2, "rule": "k_seq", "do_sample": True}
    schedule = {"num_assistant_tokens_schedule": "heuristic"}
    other = hf_models.build("llama", vocab_size=97)
    return {
        "tree": ({"tree": 3}, "tree must be a TreeSpec, EagleTree, TrieTree"),
        "no drafter": ({"drafter": None}, "must be given with tree, got None"),
        "default": ({"drafter": "auto"}, "tree must be a TrieTree or None with drafter auto"),
        "no drafters": ({"drafter": []}, "drafter must be given with tree, got []"),
        "list": ({"drafter": [model], "tree": None}, "several drafters need tree"),
        "gamma": ({"gamma": 3}, "num_assistant_tokens must not be given with tree"),
        "schedule": (schedule, "_schedule must be 'constant' or 'optimal' with tree"),
        "cache": ({"cache": "dynamic"}, "cache must be 'auto' or 'spec' with tree, got 'dynamic'"),
        "lenient": (lenient, "rule must be 'auto', 'multi_draft_wor', 'multi_draft', 'top_k_plus_"),
        "several": (k_seq, "with this drafter, got 'k_seq'"),
        "greedy": ({"rule": "greedy", "do_sample": True}, "rule='greedy' needs do_sample=False"),
        "eagle": (
            {"tree": EagleTree(), "drafter": "prompt_lookup"},
            "drafter must be one draft model with tree=EagleTree",
        ),
        "mixed": ({"drafter": [model, "prompt_lookup"]}, "or one that drafts several chains"),
        "rank": ({"tree": TreeSpec((-1,), (64,))}, "ranks of tree must be below 64, got 64"),
        "nodes": (
            {"tree": (60, 8), "drafter": [model, model]},
            "tree must have at most 1024 nodes over all draft models, got 540 for each of 2",
        ),
        "vocabulary": ({"drafter": other}, "drafter has 97 tokens, model has 67"),
    }


@pytest.mark.parametrize("case", list(refused()))
def test_refused_arguments_are_named(case):
    kwargs, message = refused()[case]
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    given = {"tree": (2,), "drafter": hf_models.perturbed("llama"), **kwargs}
    with pytest.raises(TypeError if case == "tree" else ValueError) as raised:
        generate(model, **inputs, max_new_tokens=4, **given)
    assert message in str(raised.value)
