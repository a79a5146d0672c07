"""One table: every drafter leaves greedy text as it is, and sampled text in its distribution."""

import pytest
from specdec_hf import generate
from specdec_hf.drafters.registry import DRAFTERS
from specdec_hf.drafters.resolve import resolve_drafter
from support import drafter_cases, hf_models
from support.drafter_proof import assert_greedy_identical, joint_p_value, lying, target
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.providers import SIGNIFICANCE

RAGGED = (9, 5, 12)
NEW = 8


def test_every_named_drafter_is_in_the_table():
    assert set(drafter_cases.NAMED) == set(DRAFTERS)


@pytest.mark.parametrize("name", drafter_cases.ALL)
def test_greedy_text_is_that_of_plain_generation(name, tmp_path):
    """For one sequence, and for a ragged batch of three."""
    model = hf_models.tiny("llama")
    assert_greedy_identical(
        lambda: drafter_cases.make(name, model, tmp_path).pop("drafter"), model,
        tree=drafter_cases.make(name, model, tmp_path).get("tree"),
    )  # fmt: skip


@pytest.mark.parametrize("name", drafter_cases.ALL)
def test_a_sampled_sequence_does_not_depend_on_its_batch(name, tmp_path):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    sampling = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "guard": False}

    def texts(ids, mask, seeds):
        arguments = drafter_cases.make(name, model, tmp_path)
        out = generate(
            model, ids, attention_mask=mask, seed=seeds, return_dict_in_generate=True, **sampling,
            **arguments,
        )  # fmt: skip
        assert out.stats.drafted > 0 or len(ids) == 1
        return out.sequences[:, -NEW:]

    together = texts(*inputs.values(), [5, 6, 7])
    for b, length in enumerate(RAGGED):
        alone = (value[b : b + 1, -length:] for value in inputs.values())
        assert texts(*alone, [5 + b])[0].tolist() == together[b].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True], ids=["one prompt", "ragged"])
@pytest.mark.parametrize("name", drafter_cases.ALL)
def test_sampled_text_keeps_its_joint_distribution(name, ragged, tmp_path):
    """The first three tokens, against the exact probabilities of all 64 texts."""
    model, _ = target()
    arguments = drafter_cases.make(name, model, tmp_path)
    chosen = DRAFTERS.get(name)
    if "tree" in arguments or (chosen is not None and chosen.own_tree):
        arguments["gamma"] = None
    assert joint_p_value(rule="auto", texts=3000, ragged=ragged, **arguments) > SIGNIFICANCE


@pytest.mark.parametrize(
    "ragged", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one prompt", "ragged"]
)
@pytest.mark.parametrize("name", [pytest.param("model", marks=pytest.mark.slow), "bigram"])
def test_a_wrong_drafter_is_rejected(name, ragged, tmp_path):
    model, _ = target()
    drafter = resolve_drafter(drafter_cases.make(name, model, tmp_path)["drafter"], None)
    assert joint_p_value(lying(drafter), "token", texts=3000, ragged=ragged) < SIGNIFICANCE
