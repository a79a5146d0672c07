"""The weights and the draft vocabulary of heads by the names of published files."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import torch

from specdec_hf.arguments import Refused
from specdec_hf.heads.eagle_family.config import PairConfig
from specdec_hf.heads.eagle_family.head import DecoderHead
from specdec_hf.heads.files import check_tensors, draft_tokens

OUTPUT, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
D = TypeVar("D", bound=DecoderHead)
# Layers of a head -> the published layers whose rows they hold together.
_FUSED = {
    "qkv_proj": [f"self_attn.{x}_proj" for x in "qkv"],
    "gate_up_proj": [f"mlp.{x}_proj" for x in ("gate", "up")],
    "down_proj": ["mlp.down_proj"],
    **{name: [f"self_attn.{name}"] for name in ("o_proj", "q_norm", "k_norm")},
}


def published_weights(head: DecoderHead) -> dict[str, torch.Tensor]:
    """The weights of a head by published names, those of its decoder layers under our own."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in head.state_dict().items():
        parts = _parts(name, head.config)
        sizes = [rows or len(weight) for rows in parts.values()]
        tensors |= dict(zip(parts, weight.split(sizes), strict=True))
    return tensors


def read_published(head: DecoderHead, tensors: dict[str, torch.Tensor]) -> None:
    """Set the weights of a head from tensors as `published_weights` gives them."""
    head.load_state_dict(
        {
            name: torch.cat([tensors[part].float() for part in _parts(name, head.config)])
            for name in head.state_dict()
        }
    )


def read_head(
    make: Callable[[], D],
    tensors: dict[str, torch.Tensor],
    shapes: dict[str, list[int]],
    optional: Collection[str],
    path: Path,
    kind: str,
    target_owns: Collection[str] = (),
) -> D:
    """The head in the tensors of a file, in float32 on the host.

    Args:
        make: gives the head whose weights are read.
        tensors: by published names.
        shapes: those of all but its weights.
        optional: names that may be missing.
        path, kind: of the file, and what it holds, for messages.
        target_owns: names of tensors that are the target's even where the file holds them.

    Raises:
        ValueError: tensors whose names, shapes or numbers are wrong, by name.
    """
    with torch.random.fork_rng(devices=[]):  # the weights that replace these are no random ones
        head = make()
    own = {name: list(weight.shape) for name, weight in published_weights(head).items()}
    check_tensors(tensors, own | shapes, optional, path, kind)
    read_published(head, tensors)
    read_vocabulary(head, {name: x for name, x in tensors.items() if name not in target_owns}, path)
    return head.eval()


def head_tensors(head: DecoderHead) -> dict[str, torch.Tensor]:
    """What a file holds of a head, by the published names."""
    return {**published_weights(head), **vocabulary_tensors(head)}


def _parts(name: str, config: PairConfig) -> dict[str, int]:
    """Published names of what a weight consists of, and the rows of each; 0 is all of them."""
    module, _, kind = name.rpartition(".")
    layer, _, own = module.rpartition(".")
    parts = [f"{layer}.{part}.{kind}" for part in _FUSED[own]] if own in _FUSED else [name]
    sizes = {3: list(config.projected), 2: [config.layer.intermediate_size] * 2}
    return dict(zip(parts, sizes.get(len(parts), [0]), strict=True))


def vocabulary_shapes(config: PairConfig) -> dict[str, list[int]]:
    """Names and shapes of the output matrix, the embeddings and the draft vocabulary's maps."""
    draft, whole, size = config.draft_vocab_size, config.vocab_size, config.layer.hidden_size
    return {OUTPUT: [draft, size], EMBEDDINGS: [whole, size], "d2t": [draft], "t2d": [whole]}


def vocabulary_tensors(head: DecoderHead) -> dict[str, torch.Tensor]:
    """The maps of the draft vocabulary, and the output matrix and embeddings of the head's own."""
    tokens = head.tokens.cpu()
    tensors = {
        "d2t": tokens - torch.arange(len(tokens), device="cpu"),
        "t2d": _known(tokens, head.config.vocab_size),
    }
    if head.own_lm_head:
        tensors[OUTPUT] = head.lm_head
    if head.embeddings is not None:
        tensors[EMBEDDINGS] = head.embeddings
    return tensors


def read_vocabulary(head: DecoderHead, tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Set what `vocabulary_tensors` gives, where the file at ``path`` holds it.

    Raises:
        ValueError: maps of the draft vocabulary that are wrong, or do not agree.
    """
    whole = head.config.vocab_size
    if "d2t" in tensors:
        head.tokens = draft_tokens(tensors["d2t"], whole)
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), _known(head.tokens, whole)):
        raise Refused(f"t2d of {path} must mark the tokens of d2t and no others")
    if OUTPUT in tensors:
        head.lm_head, head.own_lm_head = tensors[OUTPUT].float(), True
    if EMBEDDINGS in tensors:
        head.embeddings = tensors[EMBEDDINGS].float()


def _known(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """[size] bool, which of the target's tokens a head can draft."""
    known = torch.zeros(size, dtype=torch.bool, device=tokens.device)
    known[tokens] = True
    return known
