"""Drafter ``sparse_cache``: its numbers, its bytes and its cost, and what it does not serve."""

import pytest
import torch
from hf.test_sparse_cache import SMALL, decode
from specdec_hf import SparseCacheDrafter, VerticalCascade, generate, pack_
from specdec_hf.drafting.context import DraftContext
from support import hf_models
from support.drafter_proof import assert_greedy_identical

MAX_TOKENS = 2**31 - 1
MINIMA = {"budget": 1, "chunk": 1, "sinks": 0, "recent": 1, "interval": 1}


def test_the_bytes_of_the_cache_are_reported():
    model = hf_models.tiny("llama")
    drafter = SparseCacheDrafter(12, **SMALL)
    out = decode(model, (30,), drafter=drafter, max_new_tokens=9)
    note = next(note for note in out.stats.notes if "drafter sparse_cache holds" in note)
    slots = drafter._draft.runner.cache.cursor.capacity
    assert drafter._draft.runner.nbytes == 2 * 2 * 2 * slots * 8 * 4
    assert f"{drafter._draft.runner.nbytes / 2**20:.3g} MiB of keys and values" in note


@pytest.mark.parametrize("numbers", [{"interval": 20_000}, {"budget": 20_000}, {}])
def test_the_cache_has_slots_for_the_text_alone(numbers):
    """Whatever the budget, the interval and the limit of new tokens are; the last row is small."""
    model = hf_models.build("llama", context=4096)
    settings = {"budget": 4, "chunk": 1, "sinks": 1, "recent": 2, "interval": 3, **numbers}

    def slots(max_new_tokens, **more):
        """Those of the sparse cache for text and of the target's cache, and the text."""
        drafter = SparseCacheDrafter(**settings)
        out = decode(model, drafter=drafter, max_new_tokens=max_new_tokens, **more)
        assert out.stats.drafted
        draft = drafter._draft
        drafts = 2 * (draft.context.max_draft + 1)  # of two rounds, each with the pending token
        assert drafts < 100
        theirs = draft.target.cache.cursor.capacity
        return draft.runner.cache.cursor.capacity - drafts, theirs, out.sequences[0]

    ours, _, text = slots(20)
    assert ours == min(settings["budget"] + settings["interval"], 9 + 20)
    end = next(t for n, t in enumerate(text[9:].tolist()) if n > 8 and t not in text[9 : 9 + n])
    ours, theirs, _ = slots(4000, eos_token_id=end)
    assert ours == min(settings["budget"] + settings["interval"], theirs)
    assert theirs < 1000


@pytest.mark.parametrize("packed", [False, True])
def test_a_draft_costs_the_bytes_that_it_reads(packed):
    """Weights that `pack_` keeps in panels alone count too, at the size of the panels."""
    model = hf_models.build("llama")
    weights = sum(p.nbytes for p in model.parameters())
    if packed:
        kept = sum(p.nbytes for p in model.parameters() if p.ndim == 1)
        weights = kept + model.model.embed_tokens.weight.nbytes + pack_(model).bytes
    drafter = SparseCacheDrafter(12, **SMALL)
    decode(model, (30,), drafter=drafter, max_new_tokens=9)
    token = 2 * 2 * 2 * 8 * 4  # keys and values of two layers of two heads
    assert drafter.relative_cost == (weights + 12 * token) / (weights + 39 * token)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget=0", "budget must be an integer in [1, 2147483647], got 0"),
        ("budget=8,recent=9,sinks=0", "budget must be at least sinks + recent = 9, got 8"),
        ("budget=64,chunk=8,recent=7", "recent must be at least chunk = 8, got 7"),
        ("budget=64,interval=0", "interval must be an integer in [1, 2147483647], got 0"),
        ("64", "sparse_cache[:budget=N[,chunk=..]] with numbers for budget, chunk, sinks, recent"),
        ("budget=64,sink=4", "recent, interval, got 'budget=64,sink=4'"),
        ("budget=x", "budget of drafter sparse_cache must be an integer, got 'x'"),
        ("budget=64,sinks=-1", f"sinks must be an integer in [0, {MAX_TOKENS}], got -1"),
        ("budget=64,recent=", "recent of drafter sparse_cache must be an integer, got ''"),
        ("budget=64,budget=3", "budget must be given once, got 'budget=64,budget=3'"),
        *(
            (
                f"{name}={number}",
                f"{name} must be an integer in [{low}, {MAX_TOKENS}], got {number}",
            )
            for name, low in MINIMA.items()
            for number in (2**31, 2**63, 10**20)
        ),
    ],
)
def test_wrong_numbers_are_refused_by_name(text, message):
    with pytest.raises(ValueError) as raised:
        SparseCacheDrafter.from_text(text)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "numbers",
    [
        {"budget": MAX_TOKENS, "interval": MAX_TOKENS},
        {"budget": MAX_TOKENS, "chunk": MAX_TOKENS, "sinks": 0, "recent": MAX_TOKENS},
        {"budget": MAX_TOKENS, "chunk": 1, "sinks": MAX_TOKENS - 1, "recent": 1},
        {"budget": 12, **SMALL, "interval": MAX_TOKENS},
    ],
)
def test_numbers_as_large_as_they_may_be_serve(numbers):
    """Within the budget drafts are the target's own tokens; the last row is beyond it."""
    drafter = SparseCacheDrafter(**numbers)
    stats = assert_greedy_identical(lambda: drafter, hf_models.tiny("llama"), 12)
    assert stats.drafted > 0
    assert (stats.accepted == stats.drafted) == (drafter.pattern.budget == MAX_TOKENS)


def test_what_does_not_go_is_refused_by_name():
    inputs = hf_models.prompts((9,))
    windowed = hf_models.build("mistral", sliding_window=16)
    for model, message, arguments in (
        (hf_models.tiny("llama"), "drafter sparse_cache needs cache='spec', got 'aligned'", {
            "cache": "aligned"
        }),
        (hf_models.tiny("llama"), "tree must be a TrieTree or None with a cascade of drafter sp", {
            "drafter": VerticalCascade("sparse_cache", "random"), "tree": (2, 1)
        }),
        (hf_models.tiny("llama"), "output_hidden_states must be False with a drafter that makes", {
            "drafter": ["sparse_cache", "random"], "output_hidden_states": True,
            "return_dict_in_generate": True,
        }),
        (hf_models.tiny("llama"), "must set rolls_back = True to draft after other d", {
            "drafter": [hf_models.perturbed("llama"), VerticalCascade("sparse_cache", "random")]
        }),
        (hf_models.tiny("gpt2"), "cannot draft for GPT2LMHeadModel: its layers must be those", {}),
        (hf_models.tiny("gemma2"), "must be those of Llama, Mistral, Qwen2, Qwen3, got Gemma2D", {
        }),
        (windowed, "its attention has a window of 16 tokens, which texts of 29 exceed", {}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            generate(model, **inputs, **{"drafter": "sparse_cache", **arguments}, max_new_tokens=20)
    with pytest.raises(ValueError, match="drafts for models of Llama, Mistral, Qwen2, Qwen3, got"):
        SparseCacheDrafter().check_config(hf_models.tiny("gpt2").config)


def test_a_window_that_no_text_exceeds_is_served():
    longest = 12 + 12  # tokens of the longest prompt, and new ones
    model = hf_models.build("mistral", sliding_window=longest)
    drafter = "sparse_cache:budget=8,chunk=2,sinks=1,recent=3"
    assert assert_greedy_identical(lambda: drafter, model, 12).accepted > 0


def test_a_server_has_no_cache_to_read():
    context = DraftContext(
        hf_models.tiny("llama"), "greedy", 0.0, 0, 1.0, 0.0, torch.zeros(1), 1, 64, 8
    )
    with pytest.raises(ValueError, match="drafter sparse_cache needs cache='spec', got None"):
        SparseCacheDrafter().start(context)
