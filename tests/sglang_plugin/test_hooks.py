"""SGLang's own `eagle_sample` with the plug-in, as its loader of plug-ins installs it."""

import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compat.sglang_loops import chain, expected, linked, outputs, random_tree, sampling_info
from proofs import SIGNIFICANCE, chi_square
from specdec_sglang import plugin

from specdec_kernels.compat.sglang import chain_speculative_sampling_triton

pytest.importorskip("sglang", reason="`make more TASK=test-sglang` installs SGLang")

B, N, V = 4000, 3, 6


@pytest.fixture(scope="module")
def loaded():
    """The modules of SGLang that the tests look at, after it has loaded its plug-ins."""
    import_module("sglang.srt.plugins").load_plugins()
    context, forward, sampling, eagle, ngram, attention = (
        import_module(f"sglang.srt.{name}")
        for name in (
            "runtime_context", "model_executor.forward_batch_info", "sampling.sampling_batch_info",
            "speculative.eagle_utils", "speculative.ngram_worker", "layers.dp_attention",
        )
    )  # fmt: skip
    return SimpleNamespace(
        context=context, ForwardMode=forward.ForwardMode, attention=attention,
        SamplingBatchInfo=sampling.SamplingBatchInfo, eagle_utils=eagle, ngram_worker=ngram,
    )  # fmt: skip


@pytest.fixture
def step(loaded, monkeypatch):
    """Calls the function that the n-gram worker calls, or SGLang's own, and returns the outputs."""
    spec = SimpleNamespace(
        speculative_use_rejection_sampling=False, speculative_accept_threshold_single=1.0,
        speculative_accept_threshold_acc=1.0,
    )  # fmt: skip
    group = SimpleNamespace(world_size=1)
    for module in (loaded.context, loaded.eagle_utils):
        monkeypatch.setattr(module, "get_spec", lambda: spec)
    parallel = SimpleNamespace(tp_group=group)
    monkeypatch.setattr(loaded.context, "get_parallel", lambda: parallel)
    monkeypatch.setattr(loaded.attention, "is_dp_attention_enabled", lambda: False)

    def call(logits, tree, own=False, watermark=None, biases=None, **given):
        b, n, v = logits.shape
        links = {k: x for k, x in tree.items() if k != "candidates"}
        verify_input = loaded.ngram_worker.NgramVerifyInput(
            draft_token=tree["candidates"].flatten(), custom_mask=torch.ones(b, n, n).bool(),
            positions=torch.zeros(b * n).long(), draft_token_num=n, **links,
        )  # fmt: skip
        info = sampling_info(b, loaded.SamplingBatchInfo, logit_bias=biases, **given)
        batch = SimpleNamespace(
            device="cpu", forward_mode=loaded.ForwardMode.TARGET_VERIFY, sampling_info=info,
            seq_lens=torch.arange(b), return_logprob=False,
        )  # fmt: skip
        output = SimpleNamespace(next_token_logits=logits.reshape(b * n, v).clone())
        sample = loaded.ngram_worker.eagle_sample
        if own:
            sample = sample.__wrapped__
        predicts, lengths, index = sample(
            verify_input, batch, output, None, watermark_state=watermark
        )
        return predicts.view(b, n), lengths, index

    return SimpleNamespace(call=call, spec=spec, group=group)


def two_children():
    return dict(candidates=torch.tensor([[0, 1, 4]] * B), **linked([[-1, 0, 0]] * B))


LOGITS = torch.randn(1, N, V, generator=torch.Generator().manual_seed(3)).mul(1.5)
PARAMETERS = [dict(temperatures=0.7, top_ks=4), dict(top_ps=0.7, min_ps=0.3)]


def test_all_workers_call_the_hooked_function(loaded):
    hooked = loaded.eagle_utils.eagle_sample
    assert hooked.__wrapped__.__code__.co_name == "eagle_sample"
    assert loaded.ngram_worker.eagle_sample is hooked
    common = import_module("sglang.srt.speculative.eagle_worker_common")
    assert common.eagle_sample is hooked
    assert loaded.eagle_utils.verify_tree_greedy_func.__wrapped__


@pytest.mark.parametrize("given", PARAMETERS, ids=str)
def test_sampled_requests_follow_the_target_and_without_the_plugin_they_do_not(step, given):
    torch.manual_seed(1)
    predicts, lengths, _ = step.call(LOGITS.expand(B, N, V), two_children(), **given)
    want = expected(LOGITS[0, 0], **given)
    assert chi_square(predicts[:, 0].long(), want) > SIGNIFICANCE
    assert lengths.tolist() == (1 + ((predicts[:, 0] == 1) | (predicts[:, 0] == 4)).int()).tolist()
    alone, _, _ = step.call(LOGITS.expand(B, N, V), two_children(), own=True, **given)
    assert alone[:, 0].unique().tolist() == [int(LOGITS[0, 0].argmax())]


def test_the_biases_that_sglang_adds_count(step):
    bias = torch.zeros(B, V)
    bias[:, 2] = 1.5
    torch.manual_seed(2)
    predicts, *_ = step.call(LOGITS.expand(B, N, V), two_children(), biases=bias)
    tokens = predicts[:, 0].long()
    assert chi_square(tokens, expected(LOGITS[0, 0] + bias[0])) > SIGNIFICANCE
    assert chi_square(tokens, expected(LOGITS[0, 0])) < SIGNIFICANCE


def test_greedy_requests_get_what_sglang_gives_them_beside_sampled_ones_too(step):
    generator = torch.Generator().manual_seed(3)
    tree, _ = random_tree(generator, 40, 5, 7)
    logits = torch.randint(4, (40, 5, 7), generator=generator).float()
    want = step.call(logits, tree, own=True, top_ks=1)
    top_ks = torch.where(torch.arange(40) % 2 == 0, 1, 1 << 30)
    for got in (step.call(logits, tree, top_ks=1), step.call(logits, tree, top_ks=top_ks)):
        for a, b in zip(got, want, strict=True):
            assert a[::2].tolist() == b[::2].tolist()
    assert want[1].max() > 1


@pytest.mark.parametrize(
    ("threshold", "watermark", "reason"),
    [
        (0.9, None, "an acceptance threshold below 1 is lossy"),
        (1.0, SimpleNamespace(), "a request has a watermark"),
    ],
)
def test_what_is_not_served_is_left_to_sglang_with_a_warning(
    step, loaded, logged, monkeypatch, threshold, watermark, reason
):
    monkeypatch.setattr(plugin, "_said", set())
    step.spec.speculative_accept_threshold_acc = threshold
    seen = []
    original = SimpleNamespace(call=lambda *a, **k: seen.append((a, k)))
    info = SimpleNamespace(is_all_greedy=False, has_watermark_candidates=True)
    batch = SimpleNamespace(
        forward_mode=loaded.ForwardMode.TARGET_VERIFY, sampling_info=info, seq_lens=None
    )
    for _ in range(2):
        plugin.sample(original.call, "tree", batch, "logits", None, watermark_state=watermark)
    assert seen == [(("tree", batch, "logits", None), dict(watermark_state=watermark))] * 2
    assert logged == [f"specdec_sglang leaves steps to SGLang, which is greedy here: {reason}"]
    assert plugin._step.get() is None


def test_ranks_of_tensor_parallelism_take_the_results_of_the_first(step):
    sent = []
    step.group.world_size = 2
    step.group.broadcast = lambda t, src: sent.append((list(t.shape), src))
    step.call(LOGITS.expand(3, N, V), {k: x[:3] for k, x in two_children().items()})
    assert sent == [([3 * N], 0), ([3, N], 0), ([3], 0)]


def test_the_program_of_the_page_replaces_the_verifier_of_chains(loaded):
    page = (Path(__file__).parents[2] / "docs/sglang.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "CHAIN" in b)
    names: dict = {}
    exec(block, names)
    names["register"]()
    names["HookRegistry"].apply_hooks()
    found = loaded.eagle_utils.chain_speculative_sampling_triton
    assert (
        found is import_module(names["CHAIN"].rpartition(".")[0]).chain_speculative_sampling_triton
    )
    given = chain(5, 3, 7, torch.Generator().manual_seed(0))
    got, want = outputs(5, 3, 3), outputs(5, 3, 3)
    found(**got, **{k.replace("retrieve_", "retrive_"): x for k, x in given.items()})
    chain_speculative_sampling_triton(**want, **given)
    assert got["predicts"].tolist() == want["predicts"].tolist()
