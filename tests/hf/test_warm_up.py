"""Warm-ups: which calls they make ready, and that they are made once."""

import pytest
import torch
from hf.recorded_ops import compile_on_cpu, run_layers_as_they_are
from specdec_hf import Eagle3Drafter, generate, warm_up
from specdec_hf.extras.compiled import forward
from specdec_hf.heads.eagle3.files import save_head
from specdec_hf.heads.shipped import HEAD_FOLDER
from specdec_hf.runner.packed import linear as packed_linear
from support.hf_models import build, head_for, prompts


@pytest.fixture
def traced_only(monkeypatch):
    """Graphs are traced as for inductor, and no C++ is compiled."""
    monkeypatch.setattr(forward, "BACKEND", "eager")
    compile_on_cpu(monkeypatch)


def compiled_call(model, *lengths, **settings):
    before = dict(packed_linear._copies)
    settings = {"max_new_tokens": 8, "guard": False, **settings}
    inputs = prompts(lengths, vocab_size=model.config.vocab_size)
    out = generate(
        model, **inputs, compile=True, do_sample=False, return_dict_in_generate=True, **settings
    )
    packed = [x for place, x in packed_linear._copies.items() if before.get(place) is not x]
    return out, packed


def assert_warm(call, graphs):
    """The call made no graphs and packed nothing."""
    out, packed = call
    for stats in (out.stats.compiled, *out.stats.compiled.drafts):
        assert (stats.seconds, stats.recompilations, stats.eager) == (0, 0, "")
    assert out.stats.compiled.graphs == graphs
    assert packed == []


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt2", "gemma2"))]
)
def test_what_transformers_notes_on_a_model_does_not_count_as_a_change(name, monkeypatch):
    run_layers_as_they_are(monkeypatch)
    model, inputs = build(name), prompts((9,))
    compiled_call(model, 9)
    for arguments in (
        {"output_hidden_states": True, "output_attentions": True},
        {"cache_implementation": "static"}, {"num_beams": 2}, {"do_sample": True},
    ):  # fmt: skip
        model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True, **arguments)
        assert_warm(compiled_call(model, 9), graphs=0)
    model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    model.eval()
    assert_warm(compiled_call(model, 9), graphs=0)


@pytest.mark.build
def test_the_calls_after_warm_up_make_no_graphs(traced_only):
    model = build("llama", layers=1)
    assert warm_up(model)[1].compiled.graphs == 2
    made = [one.compiled for one in warm_up(model, batch_sizes=(1, 3)).values()]
    assert [(one.graphs, one.seconds > 0) for one in made] == [(2, False), (4, True)]
    for lengths in ((9,), (9, 4, 7), (100,), (100, 80, 3)):
        assert_warm(compiled_call(model, *lengths), graphs=4)


def test_warm_up_makes_the_head_of_the_default_drafter_ready(monkeypatch, tmp_path):
    run_layers_as_they_are(monkeypatch)
    model = build("llama")
    model.config._name_or_path = str(tmp_path)
    save_head(head_for(model), tmp_path / HEAD_FOLDER, torch.float32)
    rng = torch.get_rng_state()
    made = {size: one.compiled for size, one in warm_up(model, batch_sizes=(1, 3)).items()}
    assert torch.equal(torch.get_rng_state(), rng)
    assert list(made) == [1, 3]
    for one in (*made.values(), *(one.drafts[0] for one in made.values())):
        assert one.eager == ""
        assert one.seconds > 0
    for lengths in ((9,), (100, 80, 3)):
        out, packed = compiled_call(model, *lengths)
        assert_warm((out, packed), graphs=0)
        assert len(out.stats.compiled.drafts) == 1
        assert (out.stats.drafter, out.stats.drafted > 0) == ("auto", True)


def test_warm_up_serves_the_drafter_of_the_calls(monkeypatch):
    run_layers_as_they_are(monkeypatch)
    model = build("llama")
    drafter = Eagle3Drafter(head_for(model))
    assert len(warm_up(model, [2], drafter=drafter)[2].compiled.drafts) == 1
    assert_warm(compiled_call(model, 5, 9, drafter=drafter), graphs=0)
    # Chains: their logits were not compared.
    assert compiled_call(model, 5, 9, drafter=None)[0].stats.compiled.seconds > 0


def test_warm_up_packs_on_a_cpu_or_says_why_not():
    model = build("llama")
    assert warm_up(model)[1].packed.seconds > 0
    again = generate(model, **prompts((9,)), max_new_tokens=1, return_dict_in_generate=True)
    assert (again.stats.packed.layers, again.stats.packed.seconds) == (15, 0)
    with pytest.warns(UserWarning, match="runs its own forwards: it is in training mode"):
        made = warm_up(build("llama").train())
    assert made[1].packed.reason == "it is in training mode"
    with pytest.raises(TypeError, match="model must be"):
        warm_up("x")
