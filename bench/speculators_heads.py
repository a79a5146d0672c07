"""Compares heads of P-EAGLE and DFlash with vLLM's library speculators, number for number.

    pip install --no-deps speculators==0.9.0 hs-connectors loguru openai sniffio datasets \\
        multiprocess dill pandas pyarrow xxhash
    python -m bench.speculators_heads

Heads of small random weights are made and written by the library. For each, the table has the
largest difference between the logits of its module and those that our drafter drew from, over all
rounds of a sampled call, the largest logit, and as a control the difference where the module is
given the states of the target's layers in another order. What our writers write is then read by the
library, whose weights must be the same.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from specdec_hf import generate
from specdec_papers.dflash import DFlashDrafter, load_dflash, save_dflash
from specdec_papers.peagle import PEagleDrafter, load_peagle, save_peagle
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config
from transformers.utils.logging import disable_progress_bar

VOCAB, SIZE, DRAFTS = 96, 64, 5
LAYERS = (1, 3, 2)
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
    "use_sliding_window": True,
}  # fmt: skip
# The kind of head, fields of its config, and those of its decoder layers.
HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "DFlash": ("dflash", {}, {}),
    "DFlash, a part of the vocabulary": ("dflash", {"draft_vocab_size": 40}, {}),
    "DFlash, sliding window": ("dflash", {}, SLIDING),
    "DFlash, sliding window both ways": ("dflash", {"sliding_window_non_causal": True}, SLIDING),
    "DFlash, from the anchor": ("dflash", {"sample_from_anchor": True}, {}),
    "P-EAGLE": ("peagle", {}, {}),
    "P-EAGLE, a part of the vocabulary": ("peagle", {"draft_vocab_size": 40}, {}),
    "P-EAGLE, Llama layers": ("peagle", {}, {"model_type": "llama"}),
    "P-EAGLE, sliding window": ("peagle", {"norm_before_residual": True}, SLIDING),
    "P-EAGLE, norm before fc": ("peagle", {"norm_before_fc": True}, {}),
    "P-EAGLE, norms of each layer": ("peagle", {"fc_norm": True, "norm_output": True}, {}),
}
OURS: dict[str, tuple[Any, Any, Any]] = {
    "dflash": (DFlashDrafter, load_dflash, save_dflash),
    "peagle": (PEagleDrafter, load_peagle, save_peagle),
}
console = Console(highlight=False, width=100)


def target_in(folder: Path) -> Any:
    """A target of random weights, read from a folder that it was written to."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=SIZE, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=8, max_position_embeddings=256,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)  # whose config names the folder


def head_in(folder: Path, kind: str, fields: dict[str, Any], inner: dict[str, Any]) -> Any:
    """The library's head of random weights for the target in ``folder / "target"``, written."""
    import speculators as library  # noqa: PLC0415  # not a dependency

    inner = dict(inner)
    config_class = LlamaConfig if inner.pop("model_type", "qwen3") == "llama" else Qwen3Config
    layers = config_class(
        vocab_size=VOCAB, hidden_size=SIZE, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, max_position_embeddings=256,
        rms_norm_eps=1e-5, **inner,
    )  # fmt: skip
    layers._attn_implementation = "eager"
    draft = fields.get("draft_vocab_size", VOCAB)
    model_class, config_of, where = {
        "dflash": (library.DFlashDraftModel, library.DFlashSpeculatorConfig, ""),
        "peagle": (library.PEagleDraftModel, library.PEagleSpeculatorConfig, "eagle_"),
    }[kind]
    given = {f"{where}aux_hidden_state_layer_ids": list(LAYERS), "mask_token_id": 7}
    if kind == "dflash":
        given["block_size"] = DRAFTS + (not fields.get("sample_from_anchor"))
    made = library.SpeculatorsConfig(
        algorithm=kind, default_proposal_method="greedy",
        proposal_methods=[
            library.proposals.greedy.GreedyTokenProposalConfig(speculative_tokens=DRAFTS)
        ],
        verifier=library.VerifierConfig.from_pretrained(str(folder / "target")),
    )  # fmt: skip
    config = config_of(
        transformer_layer_config=layers, speculators_config=made,
        **{"draft_vocab_size": draft, **given, **fields},
    )  # fmt: skip
    model = model_class(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape) + (weight.ndim == 1))
    if draft < VOCAB:
        tokens = torch.randperm(VOCAB)[:draft].sort().values
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[tokens] = True
        model.load_vocab_mappings(known, tokens - torch.arange(draft))
    if kind == "dflash":
        model.load_verifier_weights()  # takes the place of what the library does not save
    model.eval().save_pretrained(folder / "head")
    return model


@contextlib.contextmanager
def seen_logits(model: Any) -> Iterator[list[torch.Tensor]]:
    """What the output matrix of a head gives."""
    seen: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda *call: seen.append(call[2]))
    yield seen
    handle.remove()


@torch.no_grad()
def library_logits(
    model: Any, kind: str, target: Any, text: list[int], layers: tuple[int, ...] = LAYERS
) -> torch.Tensor:
    """[drafts, draft vocabulary] after a text, by the library's forward for training."""
    from speculators.losses import resolve_loss_config  # noqa: PLC0415
    from speculators.models.peagle import core  # noqa: PLC0415

    states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    features = torch.cat([states[n] for n in layers], dim=-1)
    before, whole = len(text) - 1, len(text) + 2 * DRAFTS

    def padded(x: torch.Tensor) -> torch.Tensor:
        more = [0] * (2 * (x.ndim - 2)) + [0, whole - x.shape[1]]
        return torch.nn.functional.pad(x, more)

    inputs = {
        "document_ids": torch.zeros(1, whole, dtype=torch.long),
        "verifier_last_hidden_states": torch.zeros(1, whole, SIZE),
        "loss_config": resolve_loss_config("ce", "eager"),  # the other needs a GPU
    }
    with seen_logits(model) as seen:
        if kind == "dflash":
            anchor = torch.zeros(1, whole)
            anchor[0, before] = 1
            model(
                padded(features), padded(torch.tensor([text])), loss_mask=anchor, max_anchors=1,
                **inputs,
            )  # fmt: skip
            rows = seen[0][0]
            return rows if model.config.sample_from_anchor else rows[1:]
        # One chain of masks after the last pair, where training draws them at random.
        drawn, masks = core.generate_cod_sample_indices, torch.arange(1, DRAFTS)
        anchors = torch.cat([torch.arange(before), torch.full_like(masks, before - 1)])
        depths = torch.cat([torch.zeros(before, dtype=torch.long), masks])
        core.generate_cod_sample_indices = lambda **_: (anchors, depths)
        try:
            model(padded(features), padded(torch.tensor([text[1:]])), num_depths=DRAFTS, **inputs)
        finally:
            core.generate_cod_sample_indices = drawn
        return seen[0][0, before - 1 :]


def our_rounds(target: Any, drafter: Any) -> list[tuple[list[int], torch.Tensor]]:
    """The text and the logits [drafts, V] of each round of a sampled call."""
    rounds, propose = [], drafter.propose

    def proposed(history: Any, limits: Any) -> Any:
        draft = propose(history, limits)
        if draft is not None:
            text = history.tokens[0, : history.lengths[0]].tolist()
            rounds.append((text, draft.distribution.logits[0, : draft.counts[0]].clone()))
        return draft

    drafter.propose = proposed
    prompt = torch.randint(1, VOCAB, (1, 12))
    generate(
        target, prompt, drafter=drafter, max_new_tokens=24, do_sample=True, seed=1, gamma=DRAFTS,
        guard=False,
    )  # fmt: skip
    return rounds


def compared(name: str, folder: Path) -> tuple[int, float, float, float]:
    """How many rounds were compared, and of a head the largest difference, logit and control.

    Raises:
        AssertionError: the library reads other weights from what we wrote than it had written.
    """
    kind, fields, inner = HEADS[name]
    drafter, load, save = OURS[kind]
    target = target_in(folder / "target")
    model = head_in(folder, kind, fields, inner)
    head = load(folder / "head")
    figures, rounds = torch.zeros(3), our_rounds(target, drafter(folder / "head"))
    for text, logits in rounds:
        got, orders = logits[:, head.tokens], (LAYERS, LAYERS[::-1])
        want, other = (library_logits(model, kind, target, text, one)[: len(got)] for one in orders)
        found = torch.stack([x.abs().max() for x in (got - want, want, got - other)])
        figures = torch.maximum(figures, found)
    save(head, folder / "ours", torch.float32, target)
    again = type(model).from_pretrained(folder / "ours").state_dict()
    given = {k: x for k, x in model.state_dict().items() if not k.startswith("verifier_")}
    assert all(torch.equal(x, again[k]) for k, x in given.items())
    difference, largest, control = figures.tolist()
    return len(rounds), difference, largest, control


def main() -> None:
    from loguru import logger  # noqa: PLC0415  # of the library

    logger.disable("speculators")
    disable_progress_bar()
    version = importlib.metadata.version("speculators")
    table = Table(title=f"speculators {version}, torch {torch.__version__}, float32")
    for column in ("head", "rounds", "largest difference", "largest logit", "control"):
        table.add_column(column)
    for name in HEADS:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            rounds, difference, largest, control = compared(name, Path(folder))
        table.add_row(name, str(rounds), f"{difference:.1e}", f"{largest:.1f}", f"{control:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
