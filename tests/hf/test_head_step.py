"""Compiled and replayed steps of a head: what they compute, and what they fall back to."""

import gc

import pytest
import torch
from hf.recorded_ops import compile_on_cpu, leaving_out, record_ops
from specdec_hf.extras.compiled import cuda_graphs, forward
from specdec_hf.extras.compiled import head_step as compiled_step
from specdec_hf.heads.eagle3.drafter import Eagle3ChainDrafter, Eagle3Drafter
from specdec_hf.heads.eagle_family import fused_tree
from specdec_hf.heads.eagle_family.cache import HeadCache
from specdec_hf.heads.eagle_family.fused_layer import FusedLayer
from specdec_hf.heads.eagle_family.step import PackedStep, PairStep, inputs_of
from specdec_hf.runner.forwards import BUCKETS, Borrower, CompileStats
from specdec_hf.runner.packed import linear as packed_linear
from specdec_hf.runner.packed.linear import LinearWithPackedCopy
from specdec_hf.trees import EagleTree
from support import hf_models
from support.hf_models import decode, head_for, outcome


@pytest.fixture(autouse=True)
def traced_only(monkeypatch):
    # Graphs then depend on shapes as they do for inductor, which compiles C++ for seconds.
    monkeypatch.setattr(forward, "BACKEND", "aot_eager")
    compiled_step._step_graphs.cache_clear()


@pytest.fixture
def head(model):
    return head_for(model).requires_grad_(False)


def only_the_head(monkeypatch):
    compile_on_cpu(monkeypatch)
    monkeypatch.setattr(
        "specdec_hf.extras.compiled.compiled_call.use_compiled", lambda *_, **__: CompileStats()
    )


@pytest.mark.build
@pytest.mark.parametrize(
    ("kind", "lengths", "graphs"),
    [
        (Eagle3Drafter, (236,), 2),  # at the end of the context
        (Eagle3ChainDrafter, (9,), 2), (Eagle3Drafter, (9, 4, 12), 4),
    ],
)  # fmt: skip
def test_drafts_are_those_of_eager_steps_in_few_graphs(
    kind, lengths, graphs, model, head, monkeypatch
):
    only_the_head(monkeypatch)
    packed = set(packed_linear._copies)
    settings = {"lengths": lengths, "max_new_tokens": 16}
    eager = decode(model, drafter=kind(head), **settings)
    for _ in range(2):
        before = torch.get_rng_state()
        fast = decode(model, drafter=kind(head), compile=True, **settings)
        assert torch.equal(torch.get_rng_state(), before)
        assert outcome(fast) == outcome(eager)
        assert fast.stats.drafted > 0
        (drafts,) = fast.stats.compiled.drafts
        assert (drafts.eager, drafts.recompilations) == ("", 0)
        assert drafts.graphs <= graphs
        assert fast.stats.to_dict()["compiled"]["drafts"][0]["graphs"] == drafts.graphs
    gc.collect()
    assert set(packed_linear._copies) <= packed  # a copy of the head went with its drafter


def eagerly(step, **inputs):
    return step(**inputs)


def wrong_rows(self, x):
    """Negative control: a packed layer that gives the rows of its product in another order."""
    return torch.nn.functional.linear(x, self.weight, self.bias).flip(-1)


@pytest.mark.filterwarnings("ignore:PairStep runs eagerly")
@pytest.mark.parametrize("graphs", [True, False])
def test_a_head_does_not_draft_on_wrong_packed_weights(graphs, model, head, monkeypatch):
    if graphs:
        only_the_head(monkeypatch)
        monkeypatch.setattr(compiled_step.LayerGraphs, "of", lambda self, layer: eagerly)
    monkeypatch.setattr("specdec_hf.loop.plan.pack_for", lambda *_: (None, None))  # of the target
    how = {"compile": True} if graphs else {}
    eager = decode(model, drafter=Eagle3Drafter(head))
    monkeypatch.setattr(LinearWithPackedCopy, "forward", wrong_rows)
    wrong = decode(model, drafter=Eagle3Drafter(head), self_check=False, **how)
    assert wrong.stats.accepted < eager.stats.accepted  # so that the test below can fail
    drafter = Eagle3Drafter(head)
    for settings in ({}, {"self_check": False}) if graphs else ({},):  # what was found is kept
        out = decode(model, drafter=drafter, **settings, **how)
        assert outcome(out) == outcome(eager)
        assert any("packed weights" in note for note in out.stats.notes)


@pytest.mark.parametrize("name", ["llama", "qwen3"])  # the second normalises its heads
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_layer_in_one_op_is_the_layer(name, dtype):
    """With a mask, and without one for a single pair and for the first ones."""
    head = head_for(hf_models.build(name, vocab_size=11), noise=0.1).to(dtype).requires_grad_(False)
    with torch.no_grad():
        for norm in (head.midlayer.hidden_norm, head.midlayer.post_attention_layernorm):
            norm.weight.mul_(torch.linspace(0.5, 2, len(norm.weight)))
    fused = PackedStep(head, rounded=False, fused=True).packed
    own = PackedStep(head, rounded=False, fused=False).packed
    assert (type(fused.midlayer), type(own.midlayer)) == (FusedLayer, type(head.midlayer))
    for pairs, mask in ((1, "given"), (5, "given"), (1, None), (5, None)):
        outputs = []
        for step in (fused, own):
            inputs = inputs_of(PairStep(head), 2, pairs)
            if mask is None:
                first = torch.zeros(2, dtype=torch.int64)
                seen = {"mask": None, "visible": pairs if pairs > 1 else 9}
                inputs |= {"starts": first if pairs > 1 else first + 8, **seen}
            outputs.append([*step(**inputs), inputs["keys"], inputs["values"]])
        for mine, its in zip(*outputs, strict=True):
            tolerance = 1e-5 if dtype == torch.float32 else 0.05
            assert (mine - its).abs().max() <= tolerance * its.abs().max()
    head.midlayer.norm_before_residual = True
    assert head.midlayer.norms_of_parts() is None
    head.midlayer.norm_before_residual, head.midlayer.hidden_norm.eps = False, 0.5
    assert head.midlayer.norms_of_parts() is None


def test_a_head_that_takes_too_much_memory_is_not_packed(model, head, monkeypatch):
    monkeypatch.setattr("specdec_hf.loop.plan.pack_for", lambda *_: (None, None))  # of the target
    monkeypatch.setattr("specdec_hf.runner.packed.model.LARGEST_SHARE", 0.0)
    notes = decode(model, drafter=Eagle3Drafter(head)).stats.notes
    reason = "the head drafts on unpacked weights: packed weights would take"
    assert any(reason in note for note in notes), notes


@pytest.fixture
def recorded(monkeypatch):
    record_ops(monkeypatch)
    only_the_head(monkeypatch)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("kind", "lengths"),
    [(Eagle3Drafter, (9, 4)), pytest.param(Eagle3ChainDrafter, (9,), marks=pytest.mark.full)],
)
def test_drafts_are_those_without_graphs(model, head, kind, lengths):
    eager, drafter = decode(model, lengths, drafter=kind(head)), kind(head)
    graphs = []
    for _ in range(2):
        out = decode(model, lengths, drafter=drafter, compile=True)
        assert torch.equal(out.sequences, eager.sequences)
        assert out.stats.accepted == eager.stats.accepted > 0
        (made,) = out.stats.compiled.drafts
        assert (made.eager, made.without_cuda_graphs) == ("", "")
        assert made.replayed > 0
        graphs.append(made.cuda_graphs)
    assert graphs[0] == graphs[1] <= len(BUCKETS)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("moved", [True, False])
def test_weights_that_move_end_the_graphs(head, moved):
    step, call = compiled_step._made_for(head), Borrower()
    step.check_replays(head, 1)
    made = len(step.cuda_graphs)
    if moved:
        head.norm.weight.data = head.norm.weight.data.clone()
    step.lend(HeadCache(head.config, 1, head.fc.weight, 24), call, call)
    assert len(step.cuda_graphs) == (0 if moved else made)
    assert made > 0


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("left_out", ["embeddings", "mask"])
def test_the_self_check_of_a_head_finds_what_a_replay_leaves_out(
    model, head, monkeypatch, left_out
):
    names = ("embeddings", "hidden", "places", "starts", "mask", "cosines", "sines")
    step = compiled_step._made_for(head)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_graphs.Recording, "__call__", leaving_out(names, left_out))
        step.check_replays(head, 2)
    assert "its logits differ from the head's own" in step.cuda_graphs.reason
    assert step.cuda_graphs._cache is None, "buffers that are lent no more are not kept"
    drafter = Eagle3Drafter(head)
    out = decode(model, drafter=drafter, compile=True)
    assert torch.equal(out.sequences, decode(model, drafter=Eagle3Drafter(head)).sequences)


@pytest.mark.parametrize("lengths", [(9,), (9, 4, 12)])
def test_a_tree_in_one_op_is_that_of_its_levels(lengths, model, head, monkeypatch):
    def drafts():
        rounds = []
        settings = {"lengths": lengths, "max_new_tokens": 24, "guard": False}
        tree = EagleTree(3, 4, 7, min_probability=0.02)
        out = decode(model, drafter=Eagle3Drafter(head, tree), trace=rounds.append, **settings)
        return out.sequences.tolist(), rounds

    calls = []
    grow = fused_tree.grow_tree_
    monkeypatch.setattr(
        fused_tree, "grow_tree_", lambda *args, **kw: calls.append(1) or grow(*args, **kw)
    )
    text, fused = drafts()
    assert len(calls) == len(fused) - 1 > 3
    monkeypatch.setattr(fused_tree, "packed_head_of", lambda _: None)
    other, levels = drafts()
    assert len(calls) == len(fused) - 1
    assert text == other
    for mine, its in zip(fused, levels, strict=True):
        size = mine.draft_token_ids.shape[1]
        assert torch.equal(mine.draft_token_ids, its.draft_token_ids[:, :size])
        assert (its.draft_token_ids[:, size:] < 0).all()
        assert mine.parents is None or torch.equal(mine.parents, its.parents[:, :size])


def test_a_tree_in_one_op_reads_plain_embeddings(model, head, monkeypatch):
    class Scaled(torch.nn.Embedding):
        """As Gemma has them."""

    call = []
    monkeypatch.setattr(fused_tree, "grow_tree_", lambda *_, **__: call.append(1))
    kind = type(model.get_input_embeddings())
    model.get_input_embeddings().__class__ = Scaled
    try:
        decode(model, drafter=Eagle3Drafter(head), max_new_tokens=4)
    finally:
        model.get_input_embeddings().__class__ = kind
    assert not call
