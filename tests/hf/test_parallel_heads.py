"""Medusa heads and those of blockwise parallel decoding: what they draft and are trained on."""

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from specdec_hf import (
    BlockwiseDrafter,
    MedusaDrafter,
    SpeculativeDecoder,
    TreeSpec,
    generate,
)
from specdec_hf.heads.blockwise import BlockwiseHeads
from specdec_hf.heads.medusa import MedusaHeads, load_medusa, save_medusa
from specdec_hf.lab.training.unrolled import unroll
from support import hf_models, published_heads
from support.heads import parallel_heads, rounds_of, text_batch
from support.published_heads import MEDUSA_WEIGHTS

KINDS = pytest.mark.parametrize("kind", [MedusaHeads, BlockwiseHeads])


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama")


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
def test_training_unrolls_what_is_drafted(kind, target):
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
    inputs = hf_models.prompts((4,), vocab_size=7)
    for rule in ("typical", "target_only"):
        out = generate(
            target, **inputs, drafter=MedusaDrafter(head), rule=rule, do_sample=True,
            max_new_tokens=8, return_dict_in_generate=True,
        )  # fmt: skip
        assert out.stats.lossless == (rule != "typical")


@pytest.mark.parametrize(("blocks", "own"), [(1, True), (2, True), (2, False)])
def test_published_medusa_heads_draft_and_are_written_back(blocks, own, target, tmp_path):
    given = published_heads.medusa(target, tmp_path / "given", blocks, own)
    head, tensors = load_medusa(given), load_file(given / MEDUSA_WEIGHTS)
    assert head.config.num_heads == 4
    inputs, settings = hf_models.prompts((9, 4)), {"max_new_tokens": 12, "do_sample": False}
    drafter = MedusaDrafter(given)
    out = generate(
        target, **inputs, **settings, drafter=drafter, guard=False, return_dict_in_generate=True
    )
    assert out.sequences.tolist() == target.generate(**inputs, **settings).tolist()
    assert out.stats.drafted > 0
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
    assert made.keys() == tensors.keys()
    assert all(torch.equal(x, tensors[name]) for name, x in made.items())
