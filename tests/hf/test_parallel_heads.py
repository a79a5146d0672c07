"""Medusa heads and those of blockwise parallel decoding: drafts, files and training."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from specdec_hf import (
    BlockwiseDrafter,
    MedusaDrafter,
    SpeculativeDecoder,
    TreeSpec,
    check_drafter,
    generate,
)
from specdec_hf.drafters.heads.parallel_draft import ParallelDraft
from specdec_hf.heads.blockwise import BlockwiseHeads
from specdec_hf.heads.medusa import MedusaHeads
from specdec_hf.heads.parallel import ParallelConfig
from specdec_hf.heads.parallel_files import (
    load_blockwise,
    load_medusa,
    save_blockwise,
    save_medusa,
)
from specdec_hf.heads.training.pipeline import Pipeline, Progress, TrainingSettings
from specdec_hf.heads.training.unrolled import unroll
from support import hf_models
from support.cli_models import END, tokenizer
from support.heads import blockwise_folder, medusa_folder, parallel_heads, text_batch
from support.hf_models import one_thread  # noqa: F401  # autouse here

pytestmark = pytest.mark.slow

DRAFTERS = {MedusaHeads: MedusaDrafter, BlockwiseHeads: BlockwiseDrafter}
FOLDERS = {
    MedusaHeads: (medusa_folder, load_medusa, save_medusa),
    BlockwiseHeads: (blockwise_folder, load_blockwise, save_blockwise),
}
KINDS = pytest.mark.parametrize("kind", DRAFTERS)


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


def drafted(target, head, drafter, lengths=(9, 4, 12)):
    """The committed text of each sequence and the logits of its heads, round by round."""
    seen, propose, states = [], drafter.propose, ParallelDraft.states
    with pytest.MonkeyPatch.context() as patch:
        made = []

        def recorded(self):
            made.append(states(self))
            return made[-1]

        def proposed(history, limits):
            draft = propose(history, limits)
            if draft is not None:
                logits = [drafter._draft.head.logits(made[-1][:, k], k) for k in range(3)]
                for b in np.flatnonzero(history.active):
                    text = history.tokens[b, : history.lengths[b]].tolist()
                    seen.append((text, torch.stack([x[b] for x in logits]), draft.tokens[b]))
            return draft

        patch.setattr(ParallelDraft, "states", recorded)
        patch.setattr(drafter, "propose", proposed)
        generate(
            target, **hf_models.prompts(lengths), drafter=drafter, max_new_tokens=10, guard=False
        )
    assert len(seen) > 4
    return seen


@KINDS
@pytest.mark.parametrize("lengths", [(9,), (9, 4, 12)], ids=["one", "ragged"])
def test_heads_read_the_state_before_the_pending_token(kind, lengths, target):
    """With the logits of the papers' formulas; from another state they differ."""
    head = parallel_heads(kind, target, range(3, 40))
    for text, logits, _ in drafted(target, head, DRAFTERS[kind](head), lengths):
        torch.testing.assert_close(logits, expected(target, head, text, 2), atol=1e-4, rtol=1e-4)
        assert (logits - expected(target, head, text, 1)).abs().max() > 1e-2
        assert (logits - expected(target, head, text, 3)).abs().max() > 1e-2


@KINDS
def test_training_unrolls_what_is_drafted(kind, target):
    """Head k at the place before the pending token, whatever follows."""
    head = parallel_heads(kind, target, range(3, 40))
    for text, logits, _ in drafted(target, head, DRAFTERS[kind](head)):
        batch = text_batch(target, (), [*text, 1, 2, 3])
        unrolled = [step[0, len(text) - 2] for step in unroll(head, batch, 3)]
        torch.testing.assert_close(torch.stack(unrolled), logits, atol=1e-4, rtol=1e-4)
        assert (logits[0] - logits[1]).abs().max() > 1e-2


def test_a_node_holds_the_token_of_its_rank_and_depth(target):
    tree = TreeSpec((-1, -1, 0, 0, 1, 3), (0, 2, 0, 1, 1, 0))
    head = parallel_heads(MedusaHeads, target, range(3, 40))
    for _, logits, tokens in drafted(target, head, MedusaDrafter(head, tree)):
        ids = head.tokens[logits.sort(dim=-1, descending=True).indices]
        nodes = zip(tree.depths, tree.ranks, strict=True)
        want = torch.stack([ids[depth - 1, rank] for depth, rank in nodes][: len(tokens)])
        assert torch.equal(tokens, want.masked_fill(tokens < 0, -1))


def test_the_chain_holds_the_best_token_of_each_head(target):
    head = parallel_heads(BlockwiseHeads, target, range(3, 40))
    for _, logits, tokens in drafted(target, head, BlockwiseDrafter(head)):
        assert torch.equal(tokens, head.tokens[logits.argmax(dim=-1)][: len(tokens)])


def test_a_tree_deeper_than_the_heads_are_many_is_refused(target):
    head = parallel_heads(MedusaHeads, target)
    with pytest.raises(ValueError, match="tree must be at most 3 deep, got 4"):
        MedusaDrafter(head, TreeSpec.chain(4))
    with pytest.raises(TypeError, match="tree must be None or a TreeSpec, got 4"):
        MedusaDrafter(head, 4)
    assert MedusaDrafter(head).depth == 3


def drafted_tokens(target, head, rule):
    """How many drafts were accepted of a sampled call, and which are less likely than typical."""
    decoder = SpeculativeDecoder(drafter=MedusaDrafter(head), rule=rule, guard=False, seed=3)
    inputs = hf_models.prompts((9,), vocab_size=7)
    text, accepted, unlikely = inputs["input_ids"][0].tolist(), 0, 0
    for step in decoder.stream(target, **inputs, do_sample=True, top_k=0, max_new_tokens=150):
        with torch.no_grad():
            rows = target(torch.tensor([text + step.tokens])).logits[0, len(text) - 1 :]
        for token, drafted, row in zip(step.tokens, step.from_draft, rows, strict=False):
            probs = row.softmax(dim=-1)
            entropy = -(probs * probs.clamp(min=1e-30).log()).sum()
            accepted += drafted
            unlikely += drafted and probs[token] <= min(0.09, 0.3 * torch.exp(-entropy)) - 1e-4
        text += step.tokens
    return accepted, int(unlikely)


@pytest.mark.slow
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
    assert check_drafter(MedusaDrafter(head), target, samples=64, max_new_tokens=3).passed


@KINDS
def test_other_heads_and_targets_are_refused(kind, target):
    with pytest.raises(TypeError, match=f"head must be {kind.__name__} .*, got int"):
        DRAFTERS[kind](3)
    other = hf_models.build("llama", vocab_size=9)
    drafter = DRAFTERS[kind](parallel_heads(kind, target))
    with pytest.raises(ValueError, match="a vocabulary of 67, got 9"):
        generate(other, **hf_models.prompts((4,), vocab_size=9), drafter=drafter)


# Files.


@KINDS
def test_heads_are_read_back_as_they_were_written(kind, target, tmp_path):
    write, load, _ = FOLDERS[kind]
    read, head = load(write(target, tmp_path)), parallel_heads(kind, target)
    assert read.config == head.config
    assert read.tokens.tolist() == head.tokens.tolist()
    state = head.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in read.state_dict().items())


def published(target, folder, heads=4, blocks=1, own=True):
    """Medusa heads as their authors publish them, whose config counts two."""
    size, generator = target.config.hidden_size, torch.Generator().manual_seed(4)
    tensors = {}
    for k in range(heads):
        for block in range(blocks):
            weight = torch.randn(size, size, generator=generator)
            tensors[f"{k}.{block}.linear.weight"] = 0.1 * weight
            tensors[f"{k}.{block}.linear.bias"] = 0.1 * weight[0]
        if own:
            rows = torch.randn(target.config.vocab_size, size, generator=generator)
            tensors[f"{k}.{blocks}.weight"] = rows
    config = {
        "base_model_name_or_path": "target", "medusa_num_heads": 2, "medusa_num_layers": blocks,
        "transformers_version": "4.31.0",
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return tensors


@pytest.mark.parametrize(("blocks", "own"), [(1, True), (2, True), (2, False)])
def test_published_medusa_heads_draft_and_are_written_back(blocks, own, target, tmp_path):
    tensors = published(target, tmp_path / "given", blocks=blocks, own=own)
    head = load_medusa(tmp_path / "given")
    assert head.config.num_heads == 4
    inputs, settings = hf_models.prompts((9, 4)), {"max_new_tokens": 12, "do_sample": False}
    drafter = MedusaDrafter(tmp_path / "given")
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
    made = load_file(tmp_path / "made" / "medusa_lm_head.safetensors")
    assert made.keys() == tensors.keys()
    assert all(torch.equal(x, tensors[name]) for name, x in made.items())


def changed(name, value=None):
    def damage(config, tensors):
        kept = config if name.startswith("medusa") else tensors
        kept.pop(name, None)
        if value is not None:
            kept[name] = value

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed("1.0.linear.bias"), "lacks 1.0.linear.bias"),
        (changed("1.0.linear.gate", torch.ones(1)), "holds 1.0.linear.gate, which no MedusaHeads"),
        (changed("2.0.linear.bias", torch.ones(3)), r"2.0.linear.bias .* \[32\], got \[3\]"),
        (changed("2.1.weight", torch.ones(9, 32)), r"2.1.weight .* \[67, 32\], got \[9, 32\]"),
        (changed("3.1.weight"), "lacks 3.1.weight"),
        (changed("medusa_num_heads", 5), "lacks 4.0.linear.bias, 4.0.linear.weight"),
        (changed("medusa_num_layers"), "must hold medusa_num_layers"),
        (changed("medusa_num_layers", True), "medusa_num_layers must be an integer, got True"),
        (changed("d2t", torch.ones(3)), "must hold vocab_size"),
    ],
)
def test_damaged_medusa_heads_are_refused_by_name(damage, message, target, tmp_path):
    tensors = published(target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    damage(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=message):
        load_medusa(tmp_path)


def test_pickled_medusa_heads_are_refused(target, tmp_path):
    torch.save(published(target, tmp_path), tmp_path / "medusa_lm_head.pt")
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ValueError, match=r"medusa_lm_head.pt is a pickle, .* convert it"):
        load_medusa(tmp_path)


# Training.


@pytest.mark.parametrize("name", ["medusa", "blockwise"])
def test_heads_learn_texts_by_heart(name, tmp_path):
    target = hf_models.build("llama", vocab_size=END + 1)
    settings = TrainingSettings(
        head=name, tokens=900, length=24, turn_length=8, rows=8, steps=60, batch_size=4,
        learning_rate=5e-3, draft_vocab_size=END + 1,
    )  # fmt: skip
    texts = ["the cat sat on the mat and ate. ", "a dog ran over the hill. "] * 14
    pipeline = Pipeline(target, tokenizer(), tmp_path, settings, Progress())
    head = pipeline.run(texts=texts)
    losses, shared = pipeline.curves.losses, pipeline.curves.shared
    for k in range(3):
        assert losses[-1][k] < losses[0][k] - 0.05
        assert shared[-1][k] > shared[0][k]
    load = {"medusa": load_medusa, "blockwise": load_blockwise}[name]
    assert load(tmp_path).config == head.config
    inputs = tokenizer()(texts[0], return_tensors="pt", return_token_type_ids=False)
    out = generate(
        target, **inputs, drafter=f"{name}:{tmp_path}", max_new_tokens=12, guard=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert out.stats.drafted > 0


def test_training_begins_at_what_the_target_would_say_next(target):
    final = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    for kind in DRAFTERS:
        head = kind(ParallelConfig.for_target(target, 67, 3, 1))
        head.begin_as(target)
        head.borrow(target)
        states = head.states(final)
        assert states.shape == (2, 5, 3, 32)
        for k in range(3):
            torch.testing.assert_close(head.logits(states[..., k, :], k), target.lm_head(final))
