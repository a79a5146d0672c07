"""Compiled forwards: the text is that of eager ones, graphs are few, the model is not changed.

A CPU takes the place of a CUDA device.
"""

import pytest
import torch
from hf.recorded_ops import CHANGES, REFUSED, compile_on_cpu, run_layers_as_they_are, tensors_in
from specdec_hf.extras.compiled import forward as compiled
from specdec_hf.extras.compiled import layers
from specdec_hf.extras.compiled.layers import LayerGraphs
from specdec_hf.runner.forwards import ForwardPolicy
from specdec_hf.runner.spec_runner import SpecRunner
from support.hf_models import build, decode, prompts
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

# Graphs are traced as for inductor, which compiles C++ for most of a minute in test_real_model.py.
TRACED = "eager"


@pytest.fixture(autouse=True)
def traced_only(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", TRACED)
    compile_on_cpu(monkeypatch)


@pytest.fixture
def as_they_are(monkeypatch):
    run_layers_as_they_are(monkeypatch)


@pytest.fixture(scope="module")
def llama():
    return build("llama")


def test_inductor_rounds_16_bit_values_as_eager_kernels_do(monkeypatch):
    options = []
    monkeypatch.setattr(torch, "compile", lambda run, **given: options.append(given["options"]))
    for dtype, backend in (
        (torch.bfloat16, "inductor"), (torch.float32, "inductor"), (torch.bfloat16, TRACED),
    ):  # fmt: skip
        LayerGraphs(dtype, backend).of(torch.nn.Linear(2, 2))
    assert ["emulate_precision_casts" in one for one in options] == [True, False, False]


@pytest.mark.build
@pytest.mark.parametrize(
    ("name", "lengths", "graphs"),
    [
        ("llama", (9,), 2), ("gpt2", (12, 4, 7), 2),
        ("gemma2", (12, 4, 7), 4),  # its layers attend to a window or to everything
    ],
)  # fmt: skip
def test_the_text_is_that_of_eager_forwards_and_graphs_are_few(name, lengths, graphs):
    model = build(name, vocab_size=11)  # so few that the text, which is copied, repeats itself
    drafter = {"drafter": "suffix_automaton", "max_new_tokens": 24}
    for more in ({}, {"num_assistant_tokens": 2}, {"tree": (2, 1, 1)}, {"drafter": None}):
        settings = drafter | more
        eager = decode(model, lengths, **settings)
        breaks = sum(counters["graph_break"].values())
        fast = decode(model, lengths, compile=True, **settings)
        assert torch.equal(fast.sequences, eager.sequences)
        assert eager.stats.compiled is None
        assert fast.stats.accepted > 0 or settings["drafter"] is None
        made = fast.stats.compiled
        assert (made.eager, made.recompilations, made.graphs) == ("", 0, graphs)
        assert fast.stats.notes == []
        assert sum(counters["graph_break"].values()) == breaks


class Repeated(TorchDispatchMode):
    """Counts the copies of keys or values [B, 4, S, 8] that all four query heads have to share."""

    count, visible = 0, -1

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        for x in tensors_in(result):
            of_all_heads = x.shape[-2:] == (self.visible, 8) and x[0].numel() == 32 * self.visible
            self.count += of_all_heads and x.untyped_storage().nbytes() == x.nbytes
        return result


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2", "mistral"])
def test_heads_that_share_keys_read_them_in_the_cache(name, as_they_are, monkeypatch):
    """Logits are those of the model. Negative control: its own attention repeats the keys."""
    more = {"qwen2": {"num_key_value_heads": 1}, "mistral": {"sliding_window": 6}}
    model, seen = build(name, **more.get(name, {})), {}
    forward = compiled.CompiledForward._forward
    for attends in (True, False):
        repeated = Repeated()

        def counted(self, cache, repeated=repeated, **inputs):
            queries, slots = inputs["input_ids"].shape[1], cache.cursor.visible
            repeated.visible = slots if queries < slots else -1  # else queries look as keys do
            with repeated:
                return forward(self, cache, **inputs)

        monkeypatch.setattr(compiled.CompiledForward, "_forward", counted)
        if not attends:
            monkeypatch.setattr(layers, "attend_by", lambda *given: False)
        made = compiled.CompiledForward(model)
        for tree in (False, True):
            assert made.warm_up(model, padded=True, tree=tree, check=True) is None
        seen[attends] = repeated.count > 0
    # One head of keys for all is repeated as a view.
    assert seen == {True: False, False: name not in ("gpt2", "qwen2")}


def wrong_slots(self, cache, width):
    """Negative control: tokens go to the slots after theirs."""
    right(self, cache, width)
    self._place.slots = self._place.slots + 1


def wrong_view(self, cache, width):
    """Negative control: the forward sees the slots from the end of the buffers."""
    right(self, cache, width)
    for buffers in self._buffers:
        buffers.keys = buffers.keys.flip(2)


def wrong_mask(self, *, attention_mask, **inputs):
    """Negative control: padding is seen as if it were text."""
    return run(self, attention_mask=torch.ones_like(attention_mask), **inputs)


right, run = compiled.CompiledForward._point_to, compiled.CompiledForward.__call__


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("_point_to", wrong_slots), ("_point_to", wrong_view), ("__call__", wrong_mask)],
)
def test_a_wrong_forward_is_found_and_the_call_runs_eagerly(name, wrong, as_they_are, monkeypatch):
    model = build("llama")
    eager = decode(model, (9,))
    monkeypatch.setattr(compiled.CompiledForward, name, wrong)
    with pytest.warns(UserWarning, match="LlamaForCausalLM runs eagerly: its logits differ"):
        output = decode(model, (9,), compile=True)
    assert torch.equal(output.sequences, eager.sequences)
    assert "its logits differ" in output.stats.compiled.eager
    assert any("runs eagerly" in note for note in output.stats.notes)


def test_a_forward_that_raises_hands_over_to_the_model(llama, as_they_are, monkeypatch):
    eager = decode(llama, (9,))
    assert decode(llama, (9,), compile=True).stats.compiled.eager == ""

    def broken(self, cache, width):
        raise RuntimeError("broken")

    monkeypatch.setattr(compiled.CompiledForward, "_point_to", broken)
    with pytest.warns(UserWarning, match="a compiled forward raised RuntimeError: broken"):
        output = decode(llama, (9,), compile=True)
    assert torch.equal(output.sequences, eager.sequences)
    assert "broken" in output.stats.compiled.eager
    assert any("runs eagerly" in note and "broken" in note for note in output.stats.notes)


@REFUSED
def test_a_model_that_cannot_be_compiled_says_why(change, reason):
    model = build("llama")
    change(model)
    with pytest.warns(UserWarning, match=reason) as caught:
        output = decode(model, (9,), compile=True)
    assert len(caught) == 1
    assert reason in output.stats.compiled.eager
    assert torch.equal(output.sequences, decode(model, (9,)).sequences)


@CHANGES
def test_a_changed_model_gets_a_new_forward(change, as_they_are):
    model = build("llama")
    decode(model, (9,), compile=True)
    before = compiled.compiled_forward(model)
    assert compiled.compiled_forward(model) is before
    torch.manual_seed(0)
    change(model)
    eager = decode(model, (9,))
    fast = decode(model, (9,), compile=True)
    assert fast.stats.compiled.eager == ""
    assert compiled.compiled_forward(model) is not before
    assert torch.equal(fast.sequences, eager.sequences)


def test_a_drafter_that_makes_forwards_of_its_own_is_refused(llama):
    with pytest.raises(ValueError, match="compile must be None or False with a drafter that makes"):
        decode(llama, (9,), compile=True, drafter="layer_skip:1-1")


def test_rows_of_padding_are_dropped_and_forgotten():
    """A row of padding that was kept would shift the rows of the tokens."""
    model = build("llama")
    ids = prompts((9,))["input_ids"]
    narrow = SpecRunner(model, 1, 32)
    wide = SpecRunner(model, 1, 32, ForwardPolicy(compiled=model))
    with torch.inference_mode():
        for begin, end, keep in ((0, 5, 5), (5, 8, 2), (8, 9, 1)):
            for runner in (wide, narrow):
                runner.tap.open({1})
            got, wanted = (
                runner.forward(ids[:, begin:end], runner.lengths, keep) for runner in (wide, narrow)
            )
            assert wide.lengths.tolist() == [end]
            assert got.shape == wanted.shape
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
            states = [runner.tap.pop()[1] for runner in (wide, narrow)]
            assert states[0].shape[1] == end - begin
            torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)
