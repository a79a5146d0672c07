"""Models that do not fit a cache: found by the self-check, run otherwise, or refused by name."""

import math
import threading

import pytest
import torch
import transformers
from specdec_hf import check_model, generate
from specdec_hf.cache import check_plan, known_fits, self_check
from specdec_hf.cache.plain import PlainCache
from specdec_hf.cache.self_check import check_fit
from specdec_hf.cache.spec_cache import FIRST, SINGLE, SpecCache
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here

from bench.tiny_models.build import build as build_class

NEW = 12
RAGGED = (9, 4, 12)
SMALL = {"vocab_size": 67, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
BART = {
    **SMALL, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48, "max_position_embeddings": 128, "init_std": 0.3, "is_decoder": True,
    "is_encoder_decoder": False, "scale_embedding": False, "dropout": 0.0,
}  # fmt: skip
CONFIGS = {
    "Bart": BART,
    "MBart": BART,
    "Pegasus": BART,
    "Bloom": {**SMALL, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
    "GPTNeo": {
        **SMALL, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48,
        "attention_types": [[["global", "local"], 1]], "window_size": 4,
        "max_position_embeddings": 128, "initializer_range": 0.3,
    },
    "Mamba": {**SMALL, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "Rwkv": {**SMALL, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
    "XLNet": {**SMALL, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    "OpenAIGPT": {**SMALL, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
}  # fmt: skip
HEADS = {"XLNet": "XLNetLMHeadModel", "OpenAIGPT": "OpenAIGPTLMHeadModel"}


def build(name, dtype=torch.float32, **changes):
    config = getattr(transformers, f"{name}Config")(**{**CONFIGS[name], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = getattr(transformers, HEADS.get(name, f"{name}ForCausalLM"))(config)
        if name in ("Rwkv", "Mamba", "XLNet"):
            for weight in model.parameters():
                if weight.ndim > 1:
                    torch.nn.init.normal_(weight, std=0.3)
    model.generation_config.eos_token_id = None
    return model.eval().to(dtype)


def texts(model, lengths, **options):
    inputs = hf_models.prompts(lengths)
    kwargs = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**inputs, **kwargs)
    options = {"drafter": None, "guard": False, "return_dict_in_generate": True, **options}
    out = generate(model, **inputs, **kwargs, **options)
    return plain.tolist(), out.sequences.tolist(), out.stats


@pytest.mark.parametrize("lengths", [(9,), RAGGED], ids=str)
@pytest.mark.parametrize("name", ["Bart", "MBart", "Pegasus", "Bloom", "GPTNeo", "OpenAIGPT"])
def test_a_model_that_does_not_fit_the_spec_cache_gives_its_own_text(name, lengths):
    plain, ours, stats = texts(build(name), lengths, drafter="prompt_lookup")
    assert ours == plain
    assert stats.drafted > 0
    if len(lengths) > 1:
        assert stats.cache == {"Bloom": "aligned", "GPTNeo": "aligned", "OpenAIGPT": "none"}.get(
            name, "dynamic"
        )
        assert name == "OpenAIGPT" or "cache='spec'" in stats.notes[0]


@pytest.mark.parametrize("lengths", [(9,), RAGGED], ids=str)
@pytest.mark.parametrize("name", ["Mamba", "XLNet"])
def test_a_model_that_keeps_a_state_decodes_without_drafts_and_refuses_them(name, lengths):
    model = build(name)
    plain, ours, stats = texts(model, lengths)
    assert ours == plain
    assert stats.cache == "plain"
    for options in ({}, {"tree": (2,), "drafter": hf_models.tiny("llama")}):
        with pytest.raises(ValueError, match=f"{type(model).__name__} cannot be used") as error:
            texts(model, lengths, **{"drafter": "prompt_lookup", **options})
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["Bloom", "Bart"])
def test_a_draft_model_gets_a_cache_that_fits_it(name):
    plain, ours, stats = texts(hf_models.tiny("llama"), RAGGED, drafter=build(name))
    assert ours == plain
    assert any("draft model" in note for note in stats.notes)


@pytest.mark.parametrize("kind", ["aligned", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_the_batch_in_transformers_own_cache_gives_plain_text(name, kind):
    plain, ours, stats = texts(
        hf_models.tiny(name), RAGGED, drafter=hf_models.perturbed(name), cache=kind
    )
    assert ours == plain
    assert stats.cache == kind
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("name", hf_models.NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_no_fault(name, dtype):
    model = hf_models.build(name).to(dtype)
    for kind, tree in (("spec", True), ("aligned", False), ("dynamic", False)):
        fit = check_fit(model, kind, tree=tree)
        assert fit.reason is None, fit


def test_a_fit_names_the_forwards_without_a_mask_that_were_compared():
    def omitted(model, **options):
        return check_fit(model, "spec", **options).omitted

    llama = hf_models.tiny("llama")
    assert (
        omitted(llama, padded=False) == omitted(llama, padded=False, tree=True) == {FIRST, SINGLE}
    )
    assert omitted(llama) == frozenset()
    assert omitted(hf_models.build("llama").to(torch.bfloat16), padded=False) == {FIRST}
    assert omitted(hf_models.tiny("gemma2"), padded=False) == frozenset()  # eager
    assert omitted(hf_models.build("mistral", sliding_window=12), padded=False) == frozenset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_large_difference_is_found_in_every_dtype(dtype):
    fit = check_fit(build("Bart", dtype), "spec")
    assert fit.reason is not None, fit
    assert fit.difference > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpt_neo_is_refused_the_spec_cache_where_the_self_check_cannot_see_it(dtype):
    model = build("GPTNeo", dtype, window_size=256)
    assert check_plan.LARGEST_WINDOW < 256
    with pytest.raises(ValueError, match="local attention counts from the cache's length"):
        texts(model, (9,), drafter="prompt_lookup", cache="spec")
    _, _, stats = texts(model, RAGGED, drafter="prompt_lookup")
    assert stats.cache == "aligned"


@pytest.fixture
def forgetful():
    known_fits.forget()
    yield
    known_fits.forget()


@pytest.mark.parametrize(
    "fault", ["position", "rollback", "window", "siblings", "no mask", "padding", "misaligned"]
)
def test_the_self_check_finds_a_planted_fault(fault, monkeypatch, forgetful):
    """Negative controls: each of these faults of a cache must be found."""
    kind, tree, padded, model = "spec", False, True, hf_models.tiny("gemma2")
    if fault == "position":
        original = SpecCache.window

        def window(self, starts, size):
            made = original(self, starts, size)
            late = torch.from_numpy(starts > 0)[:, None]
            return {**made, "position_ids": made["position_ids"] + late}

        monkeypatch.setattr(SpecCache, "window", window)
    elif fault == "rollback":
        mask = SpecCache._mask
        monkeypatch.setattr(
            SpecCache, "_mask", lambda self, ids, *rest: mask(self, ids + ids.shape[1], *rest)
        )
    elif fault == "window":
        original_types = SpecCache._by_layer_type
        monkeypatch.setattr(
            SpecCache, "_by_layer_type", lambda self, f: original_types(self, lambda _: f(0))
        )
    elif fault == "siblings":
        tree = True
        original_tree = SpecCache.tree_window

        def tree_window(self, roots, parents, *rest):
            made = original_tree(self, roots, parents, *rest)
            seen = made["attention_mask"]["full_attention"]
            seen[..., -1, :] = seen.amax(dim=-2)
            return made

        monkeypatch.setattr(SpecCache, "tree_window", tree_window)
    elif fault == "no mask":
        padded, model = False, hf_models.tiny("llama")
        original_single = SpecCache.window

        def one_slot_more(self, starts, size):
            made = original_single(self, starts, size)
            if made["attention_mask"] is None and size == 1:
                self._cursor.visible += 1
            return made

        monkeypatch.setattr(SpecCache, "window", one_slot_more)
    elif fault == "padding":
        kind = "aligned"
        original_extend = PlainCache._extend_inputs

        def extend(self, size, first):
            original_extend(self, size, first)
            if self.kind == "aligned":
                self._kwargs["attention_mask"] = None

        monkeypatch.setattr(PlainCache, "_extend_inputs", extend)
    else:
        kind = "aligned"
        monkeypatch.setattr(PlainCache, "_realign", lambda self, *where: None)
    fit = check_fit(model, kind, padded=padded, tree=tree)
    assert fit.reason is not None
    assert fit.difference > 3 * fit.tolerance


@pytest.mark.parametrize("place", range(3))
def test_a_row_that_is_no_number_is_a_difference(place):
    own = torch.arange(12.0).view(3, 4)
    rows = [(0, i, row * math.nan if i == place else row) for i, row in enumerate(own)]
    assert self_check.largest_difference(rows, [own]) == math.inf


def test_the_self_check_leaves_no_trace(forgetful):
    model = hf_models.build("llama").train()
    model.model.layers[0].eval()
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    names = [sorted(vars(module)) for module in model.modules()]
    assert check_fit(model, "spec", tree=True).reason is None
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert [sorted(vars(module)) for module in model.modules()] == names
    assert calls == []
    model(torch.tensor([[1]]))
    assert calls == [1]
    handle.remove()


def test_a_class_and_configuration_is_checked_once(monkeypatch, forgetful):
    counted = []
    measure = self_check._measure
    monkeypatch.setattr(self_check, "_measure", lambda *args: counted.append(1) or measure(*args))
    for seed in (0, 1):
        check_fit(hf_models.build("llama", seed), "spec")
    assert counted == [1]
    other = hf_models.build("llama", context=128)
    check_fit(other, "spec")
    check_fit(other, "spec", padded=False)
    other.set_attn_implementation("eager")
    check_fit(other, "spec")
    assert len(counted) == 4


def test_threads_that_check_one_model_leave_no_trace(forgetful):
    model = hf_models.build("llama").train()
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    start = threading.Barrier(4)

    def check(tree, padded):
        start.wait()
        check_fit(model, "spec", tree=tree, padded=padded)

    threads = [
        threading.Thread(target=check, args=(tree, padded))
        for tree in (False, True)
        for padded in (False, True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == []
    assert all(module.training for module in model.modules())
    model(torch.tensor([[1]]))
    assert calls == [1]
    handle.remove()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("place", ["prompt", "window", "cache"])
def test_no_memory_for_the_self_check_is_not_remembered(place, error, monkeypatch, forgetful):
    model = hf_models.tiny("llama")
    owner = SpecCache if place == "cache" else PlainCache
    forward = owner.forward

    def fails(self, tokens, starts, keep):
        if place == "window" and (starts <= 0).all():
            return forward(self, tokens, starts, keep)
        raise error("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(owner, "forward", fails)
        with pytest.raises(error):
            check_fit(model, "spec")
    assert check_fit(model, "spec").difference is not None


def test_self_check_false_makes_no_forward(monkeypatch, forgetful):
    monkeypatch.setattr(self_check, "_measure", lambda *args: pytest.fail("checked"))
    plain, ours, _ = texts(
        hf_models.tiny("llama"), RAGGED, drafter=hf_models.perturbed("llama"), self_check=False
    )
    assert ours == plain


def test_check_model_prints_what_fits():
    check = check_model(build("Bloom"))
    assert check.fitting() == ["aligned", "dynamic"]
    assert check.fitting(tree=True) == []
    lines = str(check).splitlines()
    assert lines[0] == "BloomForCausalLM"
    assert lines[1].split() == ["cache", "drafts", "sequences", "difference", "verdict"]
    assert any(line.startswith("spec") and "raised ValueError" in line for line in lines)
    assert check_model(hf_models.tiny("llama")).fitting(tree=True) == ["spec"]


def test_a_context_of_minus_one_is_no_limit():
    model = build("XLNet")
    assert model.config.max_position_embeddings == -1
    plain, ours, stats = texts(model, (9,))
    assert ours == plain
    assert stats.sequences[0].stop_reason == "length"


def test_a_model_that_takes_one_token_at_a_time_is_refused_drafts():
    model = build_class("ProphetNetForCausalLM")
    ids = torch.arange(10, 19)[None]
    with pytest.raises(ValueError, match="ProphetNetForCausalLM cannot be used with drafts"):
        generate(model, ids, drafter="prompt_lookup", max_new_tokens=4)
    assert generate(model, ids, drafter=None, max_new_tokens=4).shape == (1, 13)


def test_a_note_says_what_the_self_check_did_not_cover(monkeypatch, forgetful):
    monkeypatch.setattr(check_plan, "LARGEST_WINDOW", 2)
    _, _, stats = texts(hf_models.tiny("gemma2"), (9,))
    assert any("attention beyond a window of 6 tokens is not covered" in n for n in stats.notes)


def test_a_note_names_the_cache_that_was_asked_for_and_cannot_be_had():
    _, _, stats = texts(build("OpenAIGPT"), (9,), drafter="prompt_lookup", cache="spec")
    assert stats.cache == "none"
    assert stats.notes == [
        "OpenAIGPTLMHeadModel runs with cache='none'; cache='spec': its forward takes no cache"
    ]


def test_a_reason_that_holds_for_every_cache_is_said_once():
    with pytest.raises(ValueError, match="MiniMaxForCausalLM cannot be used with drafts: it keeps"):
        texts(build_class("MiniMaxForCausalLM"), (9,), drafter="prompt_lookup")


def test_states_of_the_caller_without_a_length_are_refused_by_name():
    model, ids = build("Mamba"), torch.arange(1, 10)[None]
    with torch.no_grad():
        past = model(ids[:, :-1], use_cache=True).cache_params
    with pytest.raises(ValueError, match="past_key_values of MambaForCausalLM is not supported"):
        generate(model, ids, past_key_values=past, max_new_tokens=2)


def test_check_model_refuses_what_is_no_model():
    with pytest.raises(TypeError, match=r"model must be a causal language model .*, got 'x'"):
        check_model("x")


def test_check_model_does_not_say_fits_where_nothing_was_measured(forgetful):
    model = hf_models.build("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    check = check_model(model)
    assert str(check).count("not checked: the model's logits are not finite") == len(check.fits)
    assert check.fitting() == []


def test_a_cache_that_keeps_the_first_window_for_good_takes_no_drafts():
    model, ids = build_class("UnlimitedOcrForConditionalGeneration"), torch.arange(10, 19)[None]
    with pytest.raises(ValueError, match="takes drafts of the first window for a part of the prom"):
        generate(model, ids, drafter="prompt_lookup", max_new_tokens=4)
    settings = {"max_new_tokens": 4, "do_sample": False}
    assert generate(model, ids, **settings, drafter=None).equal(model.generate(ids, **settings))


def test_a_short_context_is_checked_with_the_tokens_that_it_holds():
    for context in (16, 17, 20):
        model = hf_models.build("llama", context=context)
        for padded in (False, True):
            fit = check_fit(model, "spec", padded=padded)
            assert fit.reason is None
            assert fit.difference is not None
