"""The EAGLE-3 head of a target: one that lies beside it, or one that this package ships.

A shipped head drafts for the weights that it was trained for, which are known by a digest, and for
other weights of these sizes that agree with it on a text that lies beside it: the share of the
target's choices that it drafts there tells whether it pays. No clock takes part, so a model has the
same answer on each of its calls.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specdec_hf.arguments import Refused, check_integers
from specdec_hf.heads.base import state_of
from specdec_hf.heads.files import CONFIG, checked_size, read_config
from specdec_hf.runner.model_record import record_of
from specdec_hf.runner.packed.model import OnlyPacked

if TYPE_CHECKING:
    from specdec_hf.heads.sample import Sample

# A round of one draft gives 1 + share tokens for a forward of two tokens, about 1.1 to 1.2 forwards
# of one, and a head step of 0.07. So it pays from a share of 0.17 to 0.27. The one of the weights
# that a head was trained for is about 0.44, with a standard error of 0.04 on 128 tokens.
LEAST_AGREEMENT = 0.25

HEAD_FOLDER = "specdec_head"  # in the folder of a target
SHIPPED = Path(__file__).parent / "shipped"  # a folder for each head
TARGET, TARGET_NAME = "target_digest", "target_name"  # in config.json
LAYERS = "eagle_aux_hidden_state_layer_ids"


class FoundHead(NamedTuple):
    """What was found for a target.

    Attributes:
        folder: of the head, or None.
        note: says that a head is shipped for other weights of these sizes, and whether it drafts.
    """

    folder: Path | None = None
    note: str | None = None


def find_head(model: Any) -> FoundHead:
    """The head for a target.

    It is the folder ``specdec_head`` of the folder that the target was loaded from, else that of
    the shipped head for these weights, else that of a shipped head for other weights of the same
    sizes that is accepted often enough. What lies beside the target is not compared with it.

    Raises:
        ValueError: a shipped head whose files cannot be read or that names no target.
    """
    name = getattr(model.config, "_name_or_path", None)
    if name and (Path(name) / HEAD_FOLDER).is_dir():
        return FoundHead(Path(name) / HEAD_FOLDER)
    others = []
    for folder in shipped_heads():
        config = read_config(folder)
        wanted = config.get(TARGET)
        if not isinstance(wanted, str):
            raise Refused(f"{folder / CONFIG} must hold {TARGET}, got {wanted!r}")
        if _has_sizes(model, config):
            if digest_of(model) == wanted:
                return FoundHead(folder)
            others.append(folder)
    found = FoundHead()
    for folder in others:
        found = _for_other_weights(model, folder)
        if found.folder is not None:
            break
    return found


def _for_other_weights(model: Any, folder: Path) -> FoundHead:
    agreement = _agreement(model, folder)
    name = target_name(folder)
    if agreement is not None and agreement >= LEAST_AGREEMENT:
        return FoundHead(
            folder,
            f"the head that is shipped for {name} drafts for other weights: it agrees with "
            f"{agreement:.0%} of a sample",
        )
    reason = "so it does not draft"
    if agreement is not None:
        reason = f"it agrees with {agreement:.0%} of a sample only, {reason}"
    return FoundHead(
        None,
        f"a head is shipped for {name}, which has this model's sizes but other weights; {reason}",
    )


def _agreement(model: Any, folder: Path) -> float | None:
    """How often a head agrees with a model; None where that cannot be found out."""
    digest = digest_of(model)
    if digest is None:
        return None
    key = folder, digest
    record = record_of(model)
    known = record.agreement
    if known is None or known[0] != key:
        from specdec_hf.heads.eagle3.files import load_head  # noqa: PLC0415  # where there is one
        from specdec_hf.heads.sample import agreement_of, read_sample  # noqa: PLC0415  # the same

        head = load_head(folder)
        sample = read_sample(folder, head.config.vocab_size)
        agreement = None if sample is None else agreement_of(head, model, sample)
        known = record.agreement = key, agreement
    return known[1]


def shipped_heads() -> list[Path]:
    """The folders of the heads that are shipped; each has the name of its target."""
    return sorted(file.parent for file in SHIPPED.glob(f"*/{CONFIG}"))


def target_name(folder: Path) -> str:
    """The target that a shipped head was trained for, with the format of its weights.

    Raises:
        ValueError: a config.json that cannot be read.
    """
    return str(read_config(folder).get(TARGET_NAME, folder.name))


def is_shipped(folder: Path) -> bool:
    """Whether a head's folder is of this package: its head was measured with its target."""
    return folder.parent == SHIPPED


def record_target(folder: Path, model: Any, sample: Sample | None = None) -> None:
    """Write the digest of a head's target into its config.json, and a text beside it.

    Args:
        folder: of the head.
        model: its target.
        sample: a text of the target; without it, the head drafts for no other weights.

    Raises:
        ValueError: a folder without a config.json, or a target whose weights cannot be read.
    """
    digest = digest_of(model)
    if digest is None:
        raise ValueError(f"the weights of {type(model).__name__} must be plain tensors in memory")
    config = read_config(folder) | {TARGET: digest}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    if sample is not None:
        from specdec_hf.heads.sample import write_sample  # noqa: PLC0415  # for training

        write_sample(folder, sample)


def digest_of(model: Any) -> str | None:
    """SHA-256 of the names, shapes and numbers of all weights, which are rounded to bfloat16.

    So copies of a checkpoint in float32 and in bfloat16 have the same digest, on any device and
    after `pack_`. One in float16 has another. It is kept with the model and made again where
    weights changed; what is written through ``weight.data`` is not seen.

    Returns:
        None where a weight is not a plain tensor, or is not in memory.
    """
    weights = dict(model.named_parameters())
    first: dict[int, tuple[str, OnlyPacked]] = {}  # of the layers that share a weight
    for name, module in model.named_modules():
        if isinstance(module, OnlyPacked) and not module.is_tied:
            first.setdefault(id(module.panels), (f"{name}.weight", module))
    packed = dict(first.values())
    if not all(map(_is_plain, weights.values())):
        return None
    memory = weights | {name: module.panels for name, module in packed.items()}
    state = tuple((name, *state_of(memory[name])) for name in sorted(memory))
    record = record_of(model)
    if record.digest is None or record.digest[0] != state:
        record.digest = state, _digest(weights | packed)
    return record.digest[1]


@torch.no_grad()
def _digest(weights: Mapping[str, torch.Tensor | OnlyPacked]) -> str:
    digest = hashlib.sha256()
    for name, own in sorted(weights.items()):
        weight = own.weight if isinstance(own, OnlyPacked) else own
        digest.update(f"{name} {list(weight.shape)}\n".encode())
        bits = weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
        digest.update(bits.numpy().tobytes())
    return digest.hexdigest()


def _is_plain(weight: torch.Tensor) -> bool:
    """Whether the numbers of a weight are in this process: not of meta or sharded tensors."""
    return type(weight.detach()) is torch.Tensor and not weight.is_meta


def _has_sizes(model: Any, config: dict[str, Any]) -> bool:
    """Whether a target has the sizes that a head needs, for which no weight is read."""
    text = model.config.get_text_config(decoder=True)
    layers = check_integers(LAYERS, config.get(LAYERS, ()))
    return all(
        getattr(text, name, None) == checked_size(config, ours)
        for name, ours in (("vocab_size", "vocab_size"), ("hidden_size", "target_hidden_size"))
    ) and all(layer <= getattr(text, "num_hidden_layers", 0) for layer in layers)
