"""Drafter ``sparse_cache``: what its cache holds, its drafts and limits."""

import re
from functools import cache, partial

import pytest
import torch
from specdec_hf import TrieTree
from specdec_papers import sparse_cache
from specdec_papers.cascade import HorizontalCascade
from specdec_papers.sparse_cache import SparseCacheDrafter
from specdec_papers.sparse_runner import SparseRunner
from specdec_papers.vertical_cascade import VerticalCascade
from support import hf_models
from support.drafter_proof import assert_greedy_identical, begun
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

pytestmark = pytest.mark.papers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SMALL = {"chunk": 2, "sinks": 1, "recent": 3, "interval": 3}
RAGGED = (30, 7, 21)
decode = partial(hf_models.decode, gamma=3)


class Recorded:
    """What a drafter held and copied in a call, and the queries that it chose by."""

    def __init__(self, monkeypatch):
        self.held, self.copies, self.queries = [], [], []
        hold, copy = SparseRunner.hold, SparseRunner.copy_committed
        queries_of = sparse_cache.queries_of

        def held(runner, sequences, slots, counts):
            self.held.append((sequences.copy(), slots.clone(), counts.copy(), runner.source))
            hold(runner, sequences, slots, counts)

        def copied(runner):
            copy(runner)
            own, theirs = (
                [[x.clone() for x in layer.buffers] for layer in one.cache.spec_layers]
                for one in (runner, runner.source)
            )
            lengths = runner.source.lengths.copy(), runner.cache.lengths.copy()
            self.copies.append((own, theirs, *lengths, len(self.held)))

        def queried(model, states, positions):
            made = queries_of(model, states, positions)
            self.queries.append((made, positions.clone()))
            return made

        monkeypatch.setattr(SparseRunner, "hold", held)
        monkeypatch.setattr(SparseRunner, "copy_committed", copied)
        monkeypatch.setattr(sparse_cache, "queries_of", queried)


@cache
def recording(name):
    """A tiny model that remembers the queries of its last forward by layer."""
    seen = {}

    def attention(module, query, *rest, **more):
        seen[module.layer_idx] = query
        return sdpa_attention_forward(module, query, *rest, **more)

    own = f"recording {name}"  # a model looks its attention up by name in every forward
    AttentionInterface.register(own, attention)
    model = hf_models.build(name)
    model.config._attn_implementation = own
    return model, seen


def own_queries(name, tokens):
    """[N, H, D], the queries of the last token of a text [T] in a plain forward."""
    model, seen = recording(name)
    with torch.no_grad():
        model(tokens[None], use_cache=False)
    return torch.stack([seen[n][0, :, -1] for n in sorted(seen)])


@pytest.mark.parametrize("compile", [None, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_chunks_are_those_of_the_highest_scores(name, compile, monkeypatch):
    """Against one loop for each layer, head and chunk, over the keys that the target's cache has.

    The queries are those of the target itself, in a forward over the text.
    """
    model = hf_models.build(name)
    recorded = Recorded(monkeypatch)
    drafter = SparseCacheDrafter(12, **SMALL)
    out = decode(model, RAGGED, drafter=drafter, compile=compile, max_new_tokens=14)
    texts = [
        row[row.shape[0] - 14 - length :] for row, length in zip(out.sequences, RAGGED, strict=True)
    ]
    assert len(recorded.held) > 4
    assert {len(sequences) for sequences, *_ in recorded.held} > {1}
    others = 0
    for (sequences, slots, counts, source), (queries, positions) in zip(
        recorded.held, recorded.queries, strict=True
    ):
        layers = [layer.buffers[0] for layer in source.cache.spec_layers]
        for r, b in enumerate(sequences.tolist()):
            position = int(positions[r])
            expected = own_queries(name, texts[b][: position + 1])
            torch.testing.assert_close(queries[:, r], expected, atol=2e-4, rtol=1e-3)
            for n, keys in enumerate(layers):
                heads = keys.shape[1]
                for h in range(heads):
                    group = expected[n].unflatten(0, (heads, -1))[h]
                    found = slots[n, r, h, : counts[r]].tolist()
                    wanted, margin = brute_force(keys[b, h], group, found[-1] + 1)
                    if margin > 1e-3:
                        assert found == wanted
                        others += wanted[1:-3] != list(range(1, len(wanted) - 3))
    assert others > 10  # chunks in the middle were chosen


def brute_force(keys, queries, length):
    """The slots of a text of some length, and by how much the last chunk is ahead of the next."""
    first, size, recent, budget = 1, 2, 3, 12
    begin = first
    while length - begin > recent:
        begin += size
    chunks = range(first, begin, size)
    logits = [
        [float(q @ keys[c : c + size].mean(dim=0)) / keys.shape[1] ** 0.5 for c in chunks]
        for q in queries
    ]
    scores = torch.tensor(logits).softmax(dim=1).sum(dim=0)
    count = (budget - first - recent) // size
    order = scores.argsort(descending=True).tolist()
    margin = float(scores[order[count - 1]] - scores[order[count]]) if len(order) > count else 1.0
    middle = [chunks[c] + i for c in sorted(order[:count]) for i in range(size)]
    return [*range(first), *middle, *range(begin, length)], margin


def test_the_cache_holds_the_targets_own_keys_and_values(monkeypatch):
    recorded = Recorded(monkeypatch)
    decode(
        hf_models.tiny("llama"), RAGGED, drafter=SparseCacheDrafter(12, **SMALL), max_new_tokens=14
    )
    held: dict[int, torch.Tensor] = {}
    seen = 0
    for own, theirs, whole, sparse, choices in recorded.copies:
        for sequences, slots, counts, _ in recorded.held[seen:choices]:
            held |= {int(b): slots[:, r, :, : counts[r]] for r, b in enumerate(sequences)}
        seen = choices
        for b, (length, ours) in enumerate(zip(whole.tolist(), sparse.tolist(), strict=True)):
            for n, layers in enumerate(zip(own, theirs, strict=True)):
                for mine, its in zip(*layers, strict=True):
                    for h in range(mine.shape[1]):
                        slots = held[b][n, h].tolist() if b in held else []
                        slots += range(slots[-1] + 1 if slots else 0, length)
                        assert len(slots) == ours
                        assert torch.equal(mine[b, h, :ours], its[b, h, slots])
    assert seen == len(recorded.held) > 4


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "seed": [1, 2, 3], "rule": "token"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_room_for_the_whole_text_all_drafts_are_accepted(settings, dtype):
    """The drafter's distribution is then the target's own; a small budget is the control."""
    model, made = hf_models.build("llama").to(dtype), {}
    for budget in (64, 12):
        drafter = SparseCacheDrafter(budget, **SMALL)
        out = decode(model, RAGGED, drafter=drafter, max_new_tokens=24, **settings)
        made[budget] = out.stats
    assert made[64].accepted == made[64].drafted > 40
    assert 0 < made[12].accepted < 0.9 * made[12].drafted
    assert "sparse_cache holds" not in " ".join(made[64].notes)
    (said,) = re.findall(r"beside the (\S+) MiB of the target", " ".join(made[12].notes))
    held = out.past_key_values.layers
    size = sum(x.nbytes for layer in held for x in (layer.keys, layer.values))
    assert size / 2**20 <= float(said) < 1.5 * size / 2**20, "with room for more"


SMALLEST = SparseCacheDrafter(12, **SMALL)


@pytest.mark.parametrize(
    ("drafter", "tree"),
    [
        (VerticalCascade(SMALLEST, "prompt_lookup"), None),
        (HorizontalCascade([SMALLEST, "prompt_lookup"], [2]), None),
        ([SMALLEST, "prompt_lookup"], TrieTree(1, 4)),
        ([VerticalCascade(SMALLEST, "random"), "nasd"], TrieTree(1, 4)),
    ],
    ids=["vertical", "horizontal", "tree", "tree of a cascade"],
)
def test_beside_other_drafters_the_text_is_that_of_one_target_after_another(drafter, tree):
    for name in ("llama", "qwen2"):
        stats = assert_greedy_identical(lambda: drafter, hf_models.tiny(name), 12, tree=tree)
        assert stats.accepted > 0


def test_what_a_sparse_cache_cannot_serve_is_refused_by_name():
    llama, hidden = hf_models.tiny("llama"), {"output_hidden_states": True}
    cascade = VerticalCascade("sparse_cache", "random")
    windowed = hf_models.build("mistral", sliding_window=16)
    for model, message, arguments in (
        (llama, "drafter sparse_cache needs cache='spec', got 'aligned'", {"cache": "aligned"}),
        (llama, "tree must be a TrieTree or None with a cascade of drafter sp", {
            "drafter": cascade, "tree": (2, 1)
        }),
        (llama, "output_hidden_states must be False with a drafter that makes", {
            "drafter": ["sparse_cache", "random"], **hidden
        }),
        (llama, "must set rolls_back = True to draft after other d", {
            "drafter": [hf_models.perturbed("llama"), cascade]
        }),
        (hf_models.tiny("gpt2"), "cannot draft for GPT2LMHeadModel: its layers must be those", {}),
        (windowed, "its attention has a window of 16 tokens, which texts of 29 exceed", {}),
    ):  # fmt: skip
        given = {"drafter": "sparse_cache", "max_new_tokens": 20, **arguments}
        with pytest.raises(ValueError, match=message):
            hf_models.decode(model, **given)
    with pytest.raises(ValueError, match="drafts for models of Llama, Mistral, Qwen2, Qwen3, got"):
        SparseCacheDrafter().check_config(hf_models.tiny("gpt2").config)
    with pytest.raises(ValueError, match="drafter sparse_cache needs cache='spec', got None"):
        begun(SparseCacheDrafter())  # as a server does, which has no cache
