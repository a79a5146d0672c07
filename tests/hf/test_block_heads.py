"""Heads that draft several tokens at once: what a pass of them computes and is trained on.

P-EAGLE and DFlash pass over mask tokens; Medusa and blockwise heads read one state; look-ahead
embeddings follow the text.
"""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from specdec_hf import (
    BlockwiseDrafter,
    DFlashDrafter,
    MedusaDrafter,
    PassHeadDrafter,
    PEagleDrafter,
    SpeculativeDecoder,
    TreeSpec,
    TrieTree,
    generate,
)
from specdec_hf.heads.blockwise import BlockwiseHeads
from specdec_hf.heads.dflash import load_dflash, save_dflash
from specdec_hf.heads.medusa import MedusaHeads, load_medusa, save_medusa
from specdec_hf.heads.peagle import load_peagle, save_peagle
from specdec_hf.lab.training.unrolled import acceptance_of, loss_of, unroll
from specdec_hf.runner.spec_runner import SpecRunner
from support import block_heads, hf_models, published_heads
from support.block_heads import DRAFTS, LAYERS, Reference
from support.drafter_proof import assert_greedy_identical
from support.heads import parallel_heads, pass_head, rounds_of, text_batch
from support.histories import context_of, history_of, propose
from support.published_heads import MEDUSA_WEIGHTS

SAMPLED = {"do_sample": True, "seed": [5, 6, 7], "gamma": 2 * DRAFTS}
SLIDING = {"types": ("sliding", "full"), "window": 3}
DRAFTERS = {"dflash": DFlashDrafter, "peagle": PEagleDrafter}
FILES = {"dflash": (load_dflash, save_dflash), "peagle": (load_peagle, save_peagle)}
# The kind of head and fields of config.json.
CASES = {
    "dflash": ("dflash", {}),
    "dflash, windows": ("dflash", SLIDING),
    "dflash, windows both ways": ("dflash", SLIDING | {"sliding_window_non_causal": True}),
    "dflash, from the anchor": (
        "dflash", {"sample_from_anchor": True, "block_size": DRAFTS, "draft": 67},
    ),
    "peagle": ("peagle", {"draft": 67}),
    "peagle, one Llama layer": ("peagle", {"types": ("full",), "model_type": "llama"}),
    "peagle, windows": ("peagle", SLIDING | {"norm_before_residual": True}),
    "peagle, features normalised": ("peagle", {"norm_before_fc": True}),
    "peagle, each layer's normalised": ("peagle", {"fc_norm": True, "model_type": "llama"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return hf_models.tiny("llama")


def made(name, target, folder):
    kind, fields = CASES[name]
    return kind, getattr(block_heads, kind)(target, folder, **fields)


def differences(reference, rounds):
    """How far the logits of each draft of a sequence are from the reference's."""
    found = []
    for texts, draft in rounds:
        rows = draft.distribution.logits
        for b, count in enumerate(draft.counts):
            if count:
                got, want = rows[b, :count].double(), reference.logits(texts[b])[:count]
                other = torch.ones(rows.shape[-1], dtype=torch.bool)
                other[reference.tokens] = False
                assert got[:, other].eq(-torch.inf).all()
                found.append(float((got[:, reference.tokens] - want).abs().max()))
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_pass_computes_what_the_layout_means(name, target, tmp_path):
    """Of every round of a ragged batch, against a reference that goes place by place."""
    kind, folder = made(name, target, tmp_path)
    _, rounds = rounds_of(target, DRAFTERS[kind](folder), (9, 4, 12), **SAMPLED)
    found = differences(Reference(target, folder), rounds)
    assert len(found) > 12
    assert max(int(draft.counts.max()) for _, draft in rounds) == DRAFTS
    assert max(found) < 1e-4


def inside(name, value):
    return {"transformer_layer_config": lambda inner: inner | {name: value}}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("dflash", {LAYERS["dflash"]: [0, 1]}),
        ("dflash", {"mask_token_id": 5}),
        ("dflash, windows", {"sliding_window_non_causal": True}),
        ("dflash, windows", inside("sliding_window", 4)),
        ("dflash, windows", inside("layer_types", ["full_attention", "sliding_attention"])),
        ("dflash, from the anchor", {"sample_from_anchor": False}),
        ("peagle", {LAYERS["peagle"]: [0, 1]}),
        ("peagle", {"mask_token_id": 5}),
        ("peagle", inside("rope_parameters", {"rope_type": "default", "rope_theta": 70.0})),
        ("peagle, windows", {"norm_before_residual": False}),
        ("peagle, windows", inside("sliding_window", 2)),
    ],
)
def test_a_wrong_reading_of_a_field_is_found(name, fields, target, tmp_path):
    """Negative control of the test above."""
    kind, folder = made(name, target, tmp_path)
    reference, path = Reference(target, folder), folder / "config.json"
    config = json.loads(path.read_text())
    for field, value in fields.items():
        config[field] = value(config[field]) if callable(value) else value
    path.write_text(json.dumps(config))
    _, rounds = rounds_of(target, DRAFTERS[kind](folder), (9, 4, 12), **SAMPLED)
    assert max(differences(reference, rounds[:3])) > 1e-2


def test_embeddings_in_a_file_of_dflash_are_not_its_own(target, tmp_path):
    """Nor is the output matrix of the whole vocabulary: the library overwrites both."""
    folder, seen = block_heads.dflash(target, tmp_path, draft=67), []
    file = folder / "model.safetensors"
    rows = {name: torch.ones(67, 32) for name in ("embed_tokens.weight", "lm_head.weight")}
    for tensors in (load_file(file), load_file(file) | rows):
        save_file(tensors, file)
        _, rounds = rounds_of(target, DFlashDrafter(folder), (9,), **SAMPLED | {"seed": 5})
        seen.append([draft.distribution.logits for _, draft in rounds])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


@pytest.mark.parametrize("kind", FILES)
def test_a_block_may_reach_beyond_the_context(kind, target, tmp_path):
    """Its places do; the tokens that are drafted do not."""
    folder, inputs = getattr(block_heads, kind)(target, tmp_path), hf_models.prompts((250, 3))
    settings = {"max_new_tokens": 6, "do_sample": False}
    plain = generate(target, **inputs, **settings, drafter=None)
    out, rounds = rounds_of(target, DRAFTERS[kind](folder), (250, 3), **settings, gamma=DRAFTS)
    assert out.sequences.tolist() == plain.tolist()
    for texts, draft in rounds:
        ends = [len(text) + count for text, count in zip(texts, draft.counts, strict=True)]
        assert max(ends) <= 256


@pytest.mark.parametrize("name", CASES)
def test_a_head_is_written_back_as_it_was(name, target, tmp_path):
    (tmp_path / "given").mkdir()
    kind, folder = made(name, target, tmp_path / "given")
    load, save = FILES[kind]
    head, given = load(folder), load_file(folder / "model.safetensors")
    save(head, tmp_path / "made", torch.float32)
    made_again = load_file(tmp_path / "made" / "model.safetensors")
    torch.testing.assert_close(made_again, given, rtol=0, atol=0)
    assert load(tmp_path / "made").config.to_dict() == head.config.to_dict()
    fields = [
        json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "made")
    ]
    assert fields[0].keys() == fields[1].keys()
    inner = [one.pop("transformer_layer_config") for one in fields]
    drafting = [one.pop("speculators_config")["proposal_methods"][0] for one in fields]
    assert fields[0] | {"verifier": None} == fields[1] | {"verifier": None}
    assert inner[0].items() <= {**inner[1], "sliding_window": inner[0]["sliding_window"]}.items()
    assert drafting[0].items() <= drafting[1].items()


@pytest.mark.parametrize("kind", FILES)
def test_a_target_is_named_and_gives_the_rows_that_a_head_has_not(kind, target, tmp_path):
    """So that other readers of the layout find all weights in the file."""
    load, save = FILES[kind]
    head = load(getattr(block_heads, kind)(target, tmp_path / "given"))
    head.own_lm_head = False
    save(head, tmp_path / "made", torch.float32, target)
    written = load_file(tmp_path / "made" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(written, target.get_output_embeddings().weight[head.tokens])


@pytest.mark.parametrize("kind", FILES)
def test_a_target_without_the_layers_of_a_head_is_refused(kind, target, tmp_path):
    """Also where the layer is its last, whose state is kept after the norm alone."""
    folder = getattr(block_heads, kind)(target, tmp_path, **{LAYERS[kind]: [0, 2]})
    with pytest.raises(ValueError, match=r"states after 2 layers, and must read .* model's 2"):
        generate(target, **hf_models.prompts((4,)), drafter=f"{kind}:{folder}", max_new_tokens=4)


KINDS = pytest.mark.parametrize("kind", [MedusaHeads, BlockwiseHeads])


def expected(target, head, text, back):
    """Logits [K, draft vocabulary] by the papers' formulas, from the state ``back`` behind."""
    with torch.no_grad():
        final = target.model(torch.tensor([text])).last_hidden_state[0, -back]
        rows = target.lm_head.weight[head.tokens]
        made = []
        for k in range(3):
            x = final
            if isinstance(head, MedusaHeads):
                for block in range(2):
                    y = head.weights[block, k] @ x + head.biases[block, k]
                    x = x + y * torch.sigmoid(y)
            else:
                wide = torch.relu(head.hidden.weight @ x + head.hidden.bias)
                own = slice(32 * k, 32 * (k + 1))
                x = x + head.output.weight[own] @ wide + head.output.bias[own]
            made.append(rows @ x)
        return torch.stack(made)


def drafted(rows, head, tree):
    """The token of each node by these logits [K, draft vocabulary]."""
    ids = head.tokens[rows.sort(dim=-1, descending=True).indices]
    return [int(ids[depth - 1, rank]) for depth, rank in zip(tree.depths, tree.ranks, strict=True)]


CHAIN = TreeSpec.chain(3)
TREE = TreeSpec((-1, -1, 0, 0, 1, 3), (0, 2, 0, 1, 1, 0))


@pytest.mark.parametrize("lengths", [(9,), (9, 4, 12)], ids=["one", "ragged"])
@pytest.mark.parametrize(
    ("kind", "tree"), [(MedusaHeads, TREE), (BlockwiseHeads, CHAIN)], ids=["medusa", "blockwise"]
)
def test_a_node_holds_the_token_of_its_rank_and_depth(kind, tree, lengths, target):
    """By the state before the pending token; the state of another token gives other drafts."""
    head = parallel_heads(kind, target, range(3, 40))
    drafter = BlockwiseDrafter(head) if tree is CHAIN else MedusaDrafter(head, tree)
    right = Counter()
    for texts, draft in rounds_of(target, drafter, lengths)[1]:
        for text, tokens in zip(texts, draft.tokens.tolist(), strict=True):
            for back in (1, 2, 3):
                nodes = drafted(expected(target, head, text, back), head, tree)[: len(tokens)]
                pairs = zip(tokens, nodes, strict=True)
                right[back] += all(token in (-1, node) for token, node in pairs)
            right["all"] += 1
    assert right["all"] == right[2] > 4
    assert max(right[1], right[3]) < right[2]


@KINDS
def test_training_unrolls_what_heads_draft(kind, target):
    """Head k at the place before the pending token, whatever follows."""
    head, text = parallel_heads(kind, target, range(3, 40)), [5, 9, 33, 2, 60, 14]
    batch = text_batch(target, (), [*text, 1, 2, 3])
    unrolled = torch.stack([step[0, len(text) - 2] for step in unroll(head, batch, 3)])
    torch.testing.assert_close(unrolled, expected(target, head, text, 2), atol=1e-4, rtol=1e-4)
    assert (unrolled[0] - unrolled[1]).abs().max() > 1e-2


def drafted_tokens(target, head, rule):
    """How many drafts were accepted of a sampled call, and which are less likely than typical."""
    decoder = SpeculativeDecoder(drafter=MedusaDrafter(head), rule=rule, guard=False, seed=3)
    inputs = hf_models.prompts((9,), vocab_size=7)
    text, accepted, unlikely = inputs["input_ids"][0].tolist(), 0, 0
    for step in decoder.stream(target, **inputs, do_sample=True, top_k=0, max_new_tokens=60):
        with torch.no_grad():
            rows = target(torch.tensor([text + step.tokens])).logits[0, len(text) - 1 :]
        for token, drafted, row in zip(step.tokens, step.from_draft, rows, strict=False):
            probs = row.softmax(dim=-1)
            entropy = -(probs * probs.clamp(min=1e-30).log()).sum()
            accepted += drafted
            unlikely += drafted and probs[token] <= min(0.09, 0.3 * torch.exp(-entropy)) - 1e-4
        text += step.tokens
    return accepted, int(unlikely)


def test_rule_typical_accepts_typical_tokens_and_says_that_it_is_lossy():
    target = hf_models.build("llama", vocab_size=7)
    head = parallel_heads(MedusaHeads, target)
    accepted, unlikely = drafted_tokens(target, head, "typical")
    others, unlikely_ones = drafted_tokens(target, head, "target_only")
    assert accepted > others
    assert unlikely == 0 < unlikely_ones
    for rule in ("typical", "target_only"):
        settings = {"drafter": MedusaDrafter(head), "rule": rule, "do_sample": True}
        assert hf_models.decode(target, **settings).stats.lossless == (rule != "typical")


@pytest.mark.parametrize(("blocks", "own"), [(1, True), (2, True), (2, False)])
def test_published_medusa_heads_draft_and_are_written_back(blocks, own, target, tmp_path):
    given = published_heads.medusa(target, tmp_path / "given", blocks, own)
    head, tensors = load_medusa(given), load_file(given / MEDUSA_WEIGHTS)
    assert head.config.num_heads == 4
    drafter = MedusaDrafter(given)
    assert hf_models.decode_as_generate(target, (9, 4), drafter=drafter).stats.drafted > 0
    placed, final = drafter._draft.head, torch.randn(32, generator=torch.Generator().manual_seed(0))
    for k in range(4):
        x = final
        for block in range(blocks):
            name = f"{k}.{block}.linear"
            x = x + torch.nn.functional.silu(
                tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"]
            )
        rows = tensors[f"{k}.{blocks}.weight"] if own else target.lm_head.weight
        torch.testing.assert_close(placed.logits(placed.states(final)[k], k), rows @ x)
    save_medusa(head, tmp_path / "made", torch.float32)
    made = load_file(tmp_path / "made" / MEDUSA_WEIGHTS)
    torch.testing.assert_close(made, tensors, rtol=0, atol=0)


@torch.no_grad()
def direct(target, head, text):
    """Logits [1 + L, V] at the last token of a text and at the embeddings, without a cache."""
    given = target.get_input_embeddings()(torch.tensor([text]))
    whole = torch.cat([given, head.embeddings[None]], dim=1)
    return target(inputs_embeds=whole, use_cache=False).logits[0, len(text) - 1 :]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_drafts_are_those_of_a_forward_with_the_embeddings(name):
    model = hf_models.tiny(name)
    head = pass_head(model)
    for texts, draft in rounds_of(model, PassHeadDrafter(head), do_sample=False)[1]:
        for text, tokens in zip(texts, draft.tokens.tolist(), strict=True):
            assert tokens == direct(model, head, text).argmax(dim=-1)[: len(tokens)].tolist()


@pytest.mark.parametrize("gamma", [1, 2, 9])
def test_drafts_have_the_distribution_of_that_forward(gamma, target):
    head = pass_head(target)
    sampled = {"do_sample": True, "rule": "token", "temperature": 0.8, "top_k": 0, "seed": 4}
    out, seen = rounds_of(target, PassHeadDrafter(head), gamma=gamma, **sampled)
    for texts, draft in seen:
        assert draft.tokens.shape[1] <= min(gamma, 4)
        for text, rows in zip(texts, draft.distribution.logits, strict=True):
            torch.testing.assert_close(rows, direct(target, head, text)[: len(rows)])
    # The first draft of a round has the target's own distribution.
    drafting = sum(int(draft.counts[b] > 0) for _, draft in seen for b in range(2))
    assert out.stats.accepted >= drafting
    assert (out.stats.accepted == out.stats.drafted) == (gamma == 1)


def test_a_wrong_embedding_is_seen(target):
    """Negative control of the two tests above."""
    head, other = pass_head(target), pass_head(target)
    with torch.no_grad():
        other.embeddings[1] += 1
    _, seen = rounds_of(target, PassHeadDrafter(other), rule="token", do_sample=True, seed=4)
    texts, draft = seen[0]
    rows, want = draft.distribution.logits[0], direct(target, head, texts[0])
    torch.testing.assert_close(rows[:2], want[:2])
    assert float((rows[2:] - want[2:]).abs().max()) > 0.05


@pytest.mark.parametrize("lengths", [(7,), (9, 5)])
def test_the_cache_is_as_it_was_before_a_draft(lengths, target):
    """Later rounds of one token and of several have the same logits, bit for bit."""
    lengths = np.array(lengths)
    ids = torch.randint(1, 67, (len(lengths), 24), generator=torch.Generator().manual_seed(0))
    size = max(lengths)
    texts = [row[size - n : size].tolist() for row, n in zip(ids, lengths, strict=True)]
    rows = []
    for drafts in (False, True):
        runner = SpecRunner(target, len(lengths), 16)
        runner.forward(ids[:, : size - 1], lengths - size, 1)
        runner.truncate(lengths - 1)  # of the pending tokens
        before, past = runner.lengths.copy(), runner.cache.cursor.past
        if drafts:
            drafter = PassHeadDrafter(pass_head(target))
            drafter.start(context_of(target, batch_size=len(lengths), runner=runner))
            assert propose(drafter, history_of(*texts), 4).tokens.shape == (len(lengths), 4)
        assert runner.lengths.tolist() == before.tolist() == (lengths - 1).tolist()
        assert runner.cache.cursor.past == past
        rows.append(runner.forward(ids[:, size - 1 : size], lengths - 1, 1))
        rows.append(runner.forward(ids[:, 20:23], lengths, 3))
    assert torch.equal(rows[0], rows[2])
    assert torch.equal(rows[1], rows[3])


def test_a_context_that_ends_is_not_exceeded():
    model = hf_models.build("gpt2", context=24)
    head = pass_head(model)
    stats = assert_greedy_identical(lambda: PassHeadDrafter(head), model, 12)
    assert stats.accepted > 0
    assert not [note for note in stats.notes if "not packed" not in note]


def test_in_a_tree_it_drafts_one_of_the_chains(target):
    drafter = PassHeadDrafter(pass_head(target))
    for drafters in ([drafter], [drafter, "prompt_lookup"]):
        stats = assert_greedy_identical(drafters.copy, target, tree=TrieTree(1, 4))
        assert stats.accepted > 0
    assert drafter.relative_cost == 1
    assert drafter.drafts_at_once
    assert not drafter.reads_prompt


def cut_batch(target, texts, cuts):
    """A batch of two texts, the second of which is shorter."""
    padded = [text + [0] * (len(texts[0]) - len(text)) for text in texts]
    parts = [text_batch(target, (), text) for text in padded]
    given = [one.name for one in dataclasses.fields(parts[0]) if one.default is dataclasses.MISSING]
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in given}
    joined["lengths"] = torch.tensor([len(text) for text in texts])
    return type(parts[0])(**joined, cuts=torch.tensor(cuts))


TEXTS = [[5, 9, 33, 2, 60, 9, 14, 8, 21, 40, 41], [7, 7, 30, 1, 2, 52, 3, 18]]
CUTS = [[0, 9, 4], [3, 6, 3]]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_training_unrolls_what_is_drafted(name):
    """At several places of texts of different lengths in one forward, for a sliding window too."""
    model = hf_models.tiny(name)
    head = pass_head(model)
    head.borrow(model)
    batch = cut_batch(model, TEXTS, CUTS)
    unrolled = torch.stack(list(unroll(head, batch, 3)), dim=2)
    assert unrolled.shape == (2, 3, 3, 67)
    for b, c in np.ndindex(2, 3):
        want = direct(model, head, TEXTS[b][: CUTS[b][c] + 1])[1:]
        cap = model.config.final_logit_softcapping if name == "gemma2" else None
        got = unrolled[b, c] if cap is None else torch.tanh(unrolled[b, c] / cap) * cap
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_the_labels_are_the_targets_probabilities_at_the_drafted_places(target):
    """And those beyond the end of a text do not count."""
    head = pass_head(target)
    head.borrow(target)
    batch = cut_batch(target, TEXTS, CUTS)
    total, losses = loss_of(head, batch, 3)
    greedy, shared, count = acceptance_of(head, batch, 3, target.lm_head.weight)
    for k in range(1, 4):
        rows, hits, overlap = [], 0, 0.0
        for text, cuts in zip(TEXTS, CUTS, strict=True):
            for cut in (one for one in cuts if one + k < len(text)):
                with torch.no_grad():
                    labels = target(torch.tensor([text])).logits[0, cut + k].softmax(dim=-1)
                logits = direct(target, head, text[: cut + 1])[k]
                rows.append(torch.nn.functional.cross_entropy(logits, labels))
                hits += int(logits.argmax() == labels.argmax())
                overlap += float(torch.minimum(logits.softmax(dim=-1), labels).sum())
        assert losses[k - 1].item() == pytest.approx(torch.stack(rows).mean().item(), rel=1e-4)
        assert (int(greedy[k - 1]), int(count[k - 1])) == (hits, len(rows))
        assert shared[k - 1].item() == pytest.approx(overlap, rel=1e-4)
    total.backward()
    assert float(head.embeddings.grad.abs().min(dim=1).values.max()) > 0
    assert all(weight.grad is None and weight.requires_grad for weight in target.parameters())
