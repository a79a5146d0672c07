"""Models that do not fit a cache: found by the self-check, run otherwise, or refused by name."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from specdec_hf import check_model, generate
from specdec_hf.extras.rollback_runner import AlignedRunner
from specdec_hf.runner import self_check
from specdec_hf.runner.cache_kinds import CACHE_KINDS
from specdec_hf.runner.comparison import compare, tolerance_of
from specdec_hf.runner.plain_runner import PlainRunner
from specdec_hf.runner.self_check import check_cache
from specdec_hf.runner.spec_runner import SpecRunner
from support import hf_models

from bench.tiny_models.build import build
from bench.tiny_models.compare import OracleDrafter

NEW = 12
RAGGED = (9, 4, 12)


def texts(model, lengths, **options):
    inputs = hf_models.prompts(lengths)
    kwargs = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**inputs, **kwargs)
    options = {"drafter": None, "guard": False, "return_dict_in_generate": True, **options}
    if options["drafter"] == "oracle":
        options["drafter"] = OracleDrafter(plain[:, -NEW:].numpy())
    out = generate(model, **inputs, **kwargs, **options)
    return plain.tolist(), out.sequences.tolist(), out.stats


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("BartForCausalLM", "dynamic"), ("BloomForCausalLM", "aligned"),
        ("GPTNeoForCausalLM", "aligned"), ("OpenAIGPTLMHeadModel", "none"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_the_spec_cache_gets_another(name, cache):
    plain, ours, stats = texts(build(name), RAGGED, drafter="oracle")
    assert ours == plain
    assert stats.drafted > 0
    assert stats.cache == cache
    assert cache == "none" or "cache='spec'" in stats.notes[0]


def test_a_draft_model_gets_a_cache_that_fits_it():
    drafter = build("BloomForCausalLM", vocab_size=hf_models.VOCAB)
    plain, ours, stats = texts(hf_models.tiny("llama"), RAGGED, drafter=drafter)
    assert ours == plain
    assert any("draft model" in note for note in stats.notes)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("name", hf_models.NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_no_fault(name, dtype):
    model = hf_models.build(name).to(dtype)
    for kind, tree in (("spec", True), ("aligned", False), ("dynamic", False)):
        fit = check_cache(model, CACHE_KINDS[kind], tree=tree)
        assert fit.reason is None, fit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpt_neo_is_refused_the_spec_cache_where_the_self_check_cannot_see_it(dtype):
    model = build("GPTNeoForCausalLM", window_size=256).to(dtype)
    assert self_check.LARGEST_WINDOW < 256
    with pytest.raises(ValueError, match="local attention counts from the cache's length"):
        texts(model, (9,), drafter="prompt_lookup", cache="spec")
    _, _, stats = texts(model, RAGGED, drafter="prompt_lookup")
    assert stats.cache == "aligned"


def late_positions(window):
    def wrong(self, starts, size, padding=0):
        made = window(self, starts, size, padding)
        late = torch.from_numpy(starts > 0)[:, None]
        return {**made, "position_ids": made["position_ids"] + late}

    return wrong


def seen_siblings(tree_window):
    def wrong(self, roots, parents, *rest):
        made = tree_window(self, roots, parents, *rest)
        seen = made["attention_mask"]["full_attention"]
        seen[..., -1, :] = seen.amax(dim=-2)
        return made

    return wrong


def one_slot_more(window):
    def wrong(self, starts, size, padding=0):
        made = window(self, starts, size, padding)
        if made["attention_mask"] is None and size == 1:
            self.cache.cursor.visible += 1
        return made

    return wrong


def visible_padding(extend_inputs):
    def wrong(self, size, first):
        extend_inputs(self, size, first)
        if self.kind == "aligned":
            self._kwargs["attention_mask"] = None

    return wrong


# Fault -> a method, and what makes a wrong one of it.
FAULTS = {
    "position": (SpecRunner, "window", late_positions),
    "rollback": (
        SpecRunner, "_mask",
        lambda mask: lambda self, ids, *rest: mask(self, ids + ids.shape[1], *rest),
    ),
    "window": (
        SpecRunner, "by_layer_type",
        lambda by_type: lambda self, mask_of: by_type(self, lambda _: mask_of(0)),
    ),
    "siblings": (SpecRunner, "tree_window", seen_siblings),
    "no mask": (SpecRunner, "window", one_slot_more),
    "padding": (PlainRunner, "_extend_inputs", visible_padding),
    "misaligned": (AlignedRunner, "_realign", lambda _: lambda self, *where: None),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_self_check_finds_a_planted_fault(fault, monkeypatch, forgetful):
    owner, name, made_wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, made_wrong(getattr(owner, name)))
    model = hf_models.tiny("llama" if fault == "no mask" else "gemma2")
    kind = "spec" if owner is SpecRunner else "aligned"
    fit = check_cache(model, CACHE_KINDS[kind], padded=fault != "no mask", tree=fault == "siblings")
    assert fit.reason is not None
    assert fit.difference > 3 * fit.tolerance


@pytest.mark.parametrize("place", range(3))
def test_a_row_that_is_no_number_is_a_difference(place):
    own = torch.arange(12.0).view(3, 4)
    rows = [row * math.nan if i == place else row for i, row in enumerate(own)]
    for given in ((rows, own), ([torch.stack(rows)], [own])):
        found = compare(*given, 1.0)
        assert found.difference == math.inf
        assert found.fault is not None
    apart = compare([own + 1], [own], 0.0)
    assert apart.fault is not None
    assert compare([own + 1], [own], apart.difference).fault is None, "the largest that is none"


@pytest.mark.parametrize("kinds", [1, 4])
def test_the_self_check_leaves_no_trace(kinds, forgetful):
    """Nor do several threads that check one model at once."""
    model, calls = hf_models.build("llama").train(), []
    model.model.layers[0].eval()
    model.register_forward_hook(lambda *_: calls.append(1))
    state, start = torch.get_rng_state(), threading.Barrier(kinds)

    def check(tree, padded):
        start.wait()
        assert check_cache(model, CACHE_KINDS["spec"], tree=tree, padded=padded).reason is None

    with hf_models.unchanged(model), ThreadPoolExecutor(kinds) as pool:
        for done in [pool.submit(check, n % 2 == 0, n < 2) for n in range(kinds)]:
            done.result()
    assert torch.equal(torch.get_rng_state(), state)
    assert calls == []
    model(torch.tensor([[1]]))
    assert calls == [1]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("owner", [PlainRunner, SpecRunner])
def test_no_memory_for_the_self_check_is_not_remembered(owner, error, monkeypatch, forgetful):
    model, forward = hf_models.tiny("llama"), owner.forward

    def fails(self, tokens, starts, keep):
        if (starts <= 0).all():
            return forward(self, tokens, starts, keep)
        raise error("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(owner, "forward", fails)
        with pytest.raises(error):
            check_cache(model, CACHE_KINDS["spec"])
    assert check_cache(model, CACHE_KINDS["spec"]).difference is not None


def test_check_model_prints_what_fits():
    check = check_model(build("BloomForCausalLM"))
    assert check.fitting() == ["aligned", "dynamic"]
    assert check.fitting(tree=True) == []
    name, header, *lines = str(check).splitlines()
    assert (name, header.split()[0]) == ("BloomForCausalLM", "cache")
    assert any(line.startswith("spec") and "raised ValueError" in line for line in lines)
    assert check_model(hf_models.tiny("llama")).fitting(tree=True) == ["spec"]
    with pytest.raises(TypeError, match=r"model must be a causal language model .*, got 'x'"):
        check_model("x")


def test_states_of_the_caller_without_a_length_are_refused_by_name():
    model, ids = build("MambaForCausalLM"), torch.arange(1, 10)[None]
    with torch.no_grad():
        past = model(ids[:, :-1], use_cache=True).cache_params
    with pytest.raises(ValueError, match="past_key_values of MambaForCausalLM is not supported"):
        generate(model, ids, past_key_values=past, max_new_tokens=2)


def test_check_model_does_not_say_fits_where_nothing_was_measured(forgetful):
    model = hf_models.build("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    check = check_model(model)
    assert str(check).count("not checked: the model's logits are not finite") == len(check.fits)
    assert check.fitting() == []


def test_a_short_context_is_checked_with_the_tokens_that_it_holds():
    for context in (16, 17, 20):
        model = hf_models.build("llama", context=context)
        for padded in (False, True):
            fit = check_cache(model, CACHE_KINDS["spec"], padded=padded)
            assert fit.reason is None
            assert fit.difference is not None


def test_products_in_tf32_may_differ_as_much_as_others_of_as_many_bits(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=True))
    of_32, of_16 = (
        tolerance_of(SimpleNamespace(device=torch.device("cuda"), dtype=dtype))
        for dtype in (torch.float32, torch.float16)
    )
    assert of_32 == of_16
