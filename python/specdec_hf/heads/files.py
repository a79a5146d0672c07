"""EAGLE-3 heads on disk: config.json and one safetensors file, in either of two layouts.

The published one is that of the authors and of SpecForge, the other that of vLLM's library
speculators, whose config.json is nested, whose decoder layer is called ``layers.0``, and whose file
holds the embeddings and the output matrix of the target.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specdec_hf.heads.config import HeadConfig, checked
from specdec_hf.heads.eagle3 import Eagle3Head
from specdec_hf.heads.speculators import from_speculators, is_speculators, to_speculators

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PICKLES = ("pytorch_model.bin", "model.pt", "model.pth", "model.bin", "medusa_lm_head.pt")
_INTEGERS = (torch.int64, torch.int32, torch.int16)
_LAYER, _OTHER_LAYER = "midlayer.", "layers.0."
_MAPS = ("d2t", "t2d")  # of the draft vocabulary; all others are weights
_OUTPUT, _EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
# Published names whose weights are one matrix here -> that matrix.
_FUSED = {
    "midlayer.qkv_proj.weight": [f"midlayer.self_attn.{x}_proj.weight" for x in "qkv"],
    "midlayer.gate_up_proj.weight": [f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up")],
}
_RENAMED = {
    "midlayer.o_proj.weight": "midlayer.self_attn.o_proj.weight",
    "midlayer.down_proj.weight": "midlayer.mlp.down_proj.weight",
}


def save_head(head: Eagle3Head, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a head; its output matrix and its embeddings only where these are its own.

    Args:
        head: any device and dtype.
        folder: made where it is missing.
        dtype: of the weights in the file.
    """
    write_head(folder, head.config.to_dict(), _tensors(head), dtype)


def save_as_speculators(
    head: Eagle3Head, folder: Path, model: Any, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a head with the target's embeddings and output matrix, in the layout of speculators.

    Args:
        head, folder, dtype: as above.
        model: the target.

    Raises:
        ValueError: a target of other sizes.
    """
    tensors = _tensors(head)
    if _OUTPUT not in tensors:
        tensors[_OUTPUT] = head.output_of(model)
    if _EMBEDDINGS not in tensors:
        tensors[_EMBEDDINGS] = model.get_input_embeddings().weight
    tensors = _renamed(tensors, _LAYER, _OTHER_LAYER)
    write_head(folder, to_speculators(head.config.to_dict(), model.config), tensors, dtype)


def _renamed(tensors: dict[str, torch.Tensor], layer: str, other: str) -> dict[str, torch.Tensor]:
    """With another name of the decoder layer."""
    return {
        other + name[len(layer) :] if name.startswith(layer) else name: tensor
        for name, tensor in tensors.items()
    }


def _renamed_too(name: str, tensors: Collection[str]) -> bool:
    """Whether a tensor is there under both names of the decoder layer."""
    return name.startswith(_LAYER) and _OTHER_LAYER + name[len(_LAYER) :] in tensors


def _tensors(head: Eagle3Head) -> dict[str, torch.Tensor]:
    """What a file holds, by the published names."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in head.state_dict().items():
        if name in _FUSED:
            sizes = _sizes(head.config)[name]
            tensors |= dict(zip(_FUSED[name], weight.split(sizes), strict=True))
        else:
            tensors[_RENAMED.get(name, name)] = weight
    if head.own_lm_head:
        tensors[_OUTPUT] = head.lm_head
    if head.embeddings is not None:
        tensors[_EMBEDDINGS] = head.embeddings
    tokens = head.tokens.cpu()
    tensors["d2t"] = tokens - torch.arange(len(tokens))
    tensors["t2d"] = _known(tokens, head.config)
    return tensors


def write_head(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    name: str = WEIGHTS,
) -> None:
    """Write config.json and a safetensors file; ``dtype`` is that of the numbers in it."""
    tensors = {
        name: x.detach().to("cpu", dtype if x.is_floating_point() else x.dtype).contiguous()
        for name, x in tensors.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / name, {"format": "pt"})


def load_head(folder: str | Path) -> Eagle3Head:
    """A head from a folder, in float32 on the host.

    Raises:
        ValueError: a folder without a head, a pickled one, or one whose config, names or shapes are
            wrong, by name.
    """
    folder = Path(folder)
    given = read_config(folder)
    config = HeadConfig.from_dict(from_speculators(given) if is_speculators(given) else given)
    read = read_weights(folder, WEIGHTS)
    tensors = _renamed(read, _OTHER_LAYER, _LAYER)
    if len(tensors) < len(read):
        twice = sorted(name for name in read.keys() & tensors.keys() if _renamed_too(name, read))
        raise ValueError(f"{folder / WEIGHTS} holds {', '.join(twice)} in two spellings")
    with torch.random.fork_rng(devices=[]):  # the weights that replace these are no random ones
        head = Eagle3Head(config)
    optional = {"t2d"}
    if config.target_hidden_size == config.layer.hidden_size:
        optional |= {_OUTPUT, _EMBEDDINGS}  # the target's will do
    if config.draft_vocab_size == config.vocab_size:
        optional.add("d2t")
    check_tensors(tensors, _expected(head), optional, folder / WEIGHTS, "EAGLE-3 head")
    state = {}
    for name in head.state_dict():
        parts = _FUSED.get(name, [_RENAMED.get(name, name)])
        state[name] = torch.cat([tensors[part].float() for part in parts])
    head.load_state_dict(state)
    if "d2t" in tensors:
        head.tokens = draft_tokens(tensors["d2t"], config.vocab_size)
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), _known(head.tokens, config)):
        raise ValueError(f"t2d of {folder / WEIGHTS} must mark the tokens of d2t and no others")
    if _OUTPUT in tensors:
        head.lm_head, head.own_lm_head = tensors[_OUTPUT].float(), True
    if _EMBEDDINGS in tensors:
        head.embeddings = tensors[_EMBEDDINGS].float()
    return head.eval()


def _known(tokens: torch.Tensor, config: HeadConfig) -> torch.Tensor:
    """[V] bool, which of the target's tokens the head can draft."""
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[tokens] = True
    return known


def read_config(folder: Path) -> dict[str, Any]:
    """The object in a head's config.json; raises ValueError."""
    try:
        given = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot read a head's {folder / CONFIG}: {reason}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{folder / CONFIG} must hold an object, got {type(given).__name__}")
    return given


def read_weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a head's safetensors file; raises ValueError."""
    path = folder / name
    if not path.is_file():
        pickled = next((one for one in PICKLES if (folder / one).is_file()), None)
        if pickled is None:
            raise ValueError(f"{folder} holds no head: {name} is missing")
        raise ValueError(
            f"{folder / pickled} is a pickle, which may run any code when it is read; convert it "
            f"where you trust it: safetensors.torch.save_file(torch.load({pickled!r}, "
            f"weights_only=True), {name!r})"
        )
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def _sizes(config: HeadConfig) -> dict[str, list[int]]:
    """How many rows of a fused matrix each published one has."""
    size = config.layer.intermediate_size
    return dict(zip(_FUSED, (list(config.projected), [size, size]), strict=True))


def _expected(head: Eagle3Head) -> dict[str, list[int]]:
    """Published names and shapes; the last four may be missing."""
    config, shapes = head.config, {}
    for name, weight in head.state_dict().items():
        if name in _FUSED:
            for part, rows in zip(_FUSED[name], _sizes(config)[name], strict=True):
                shapes[part] = [rows, *weight.shape[1:]]
        else:
            shapes[_RENAMED.get(name, name)] = list(weight.shape)
    draft = config.draft_vocab_size
    shapes[_OUTPUT] = [draft, config.layer.hidden_size]
    shapes[_EMBEDDINGS] = [config.vocab_size, config.layer.hidden_size]
    shapes["d2t"], shapes["t2d"] = [draft], [config.vocab_size]
    return shapes


def check_tensors(
    tensors: dict[str, torch.Tensor],
    expected: dict[str, list[int]],
    optional: Collection[str],
    path: Path,
    kind: str,
) -> None:
    """Raise ValueError for a tensor that is missing, unknown or not as expected, by name.

    Args:
        tensors: of the file.
        expected: their names and shapes.
        optional: names that may be missing.
        path: of the file.
        kind: what holds them, for the message.
    """
    missing = sorted(expected.keys() - tensors.keys() - set(optional))
    unknown = sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        faults = [f"lacks {', '.join(missing)}"] * bool(missing)
        faults += [f"holds {', '.join(unknown)}, which no {kind} has"] * bool(unknown)
        raise ValueError(f"{path} {' and '.join(faults)}")
    for name, tensor in tensors.items():
        if list(tensor.shape) != expected[name]:
            raise ValueError(f"{name} of {path} must be {expected[name]}, got {list(tensor.shape)}")
        if name in _MAPS:
            continue
        if not tensor.is_floating_point():
            raise ValueError(f"{name} of {path} must have a floating dtype, got {tensor.dtype}")
        if not tensor.float().isfinite().all():
            raise ValueError(f"{name} of {path} must be finite, and some of its numbers are not")


def checked_size(
    given: dict[str, Any], name: str, default: int | None = None, minimum: int = 1
) -> int:
    """An integer of a head's config.json; ValueError where it is missing or wrong."""
    value = given.get(name, default)
    if value is None:
        raise ValueError(f"config.json of a head must hold {name}")
    return checked(name, value, minimum)


def draft_tokens(offsets: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The target's id of each draft token, from their differences; ValueError for wrong ones."""
    if offsets.dtype not in _INTEGERS:
        raise ValueError(f"d2t must hold integers, got {offsets.dtype}")
    tokens = offsets.to(torch.int64) + torch.arange(len(offsets))
    different = len(tokens.unique())
    if different < len(tokens) or not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(
            f"d2t must lead to different ids in [0, {vocab_size}), got {int(tokens.min())} to "
            f"{int(tokens.max())}, {different} of {len(tokens)} different"
        )
    return tokens
