"""The tensors of multi-token prediction in a checkpoint, which `from_pretrained` leaves out."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from specdec_hf.heads.files import CONFIG, WEIGHTS, check_tensors, opened
from transformers import AutoConfig, AutoModelForCausalLM

from specdec_papers.mtp.head import MtpBlock, MtpConfig, MtpHead

INDEX = "model.safetensors.index.json"
# Dtypes of safetensors that are no quantised ones.
_DTYPES = ("F32", "BF16", "F16")
_UNUSED = "rotary_emb.inv_freq"  # made from the config
_SHARED = ("embeddings", "lm_head")  # may be missing, and are then the target's


@dataclass(frozen=True)
class Family:
    """How the checkpoints of a model type name the tensors of multi-token prediction.

    Attributes:
        prefix: of the names; "{}" is the number of the layer, counted on from the target's layers.
        layer: what follows it in the names of the decoder layer itself.
        names: of the other parts of a `MtpBlock`.
    """

    prefix: str
    layer: str
    names: Mapping[str, str]

    def prefixes(self, names: Mapping[str, Any], total: int) -> list[str]:
        """The prefix of each layer whose tensors are among ``names``.

        Args:
            names: of all tensors of a checkpoint.
            total: how many layers the target has.
        """
        found: list[str] = []
        while True:
            prefix = self.prefix.format(total + len(found))
            if prefix in found or not any(name.startswith(prefix) for name in names):
                return found
            found.append(prefix)

    def published(self, name: str) -> str:
        """The name after the prefix of a tensor of a `MtpBlock`."""
        part, _, rest = name.partition(".")
        return f"{self.layer}{rest}" if part == "layer" else f"{self.names[part]}.weight"


# Layers after the target's own, each with everything that it needs.
_APPENDED = Family(
    "model.layers.{}.",
    "",
    {
        "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm",
        "embeddings": "embed_tokens", "lm_head": "shared_head.head",
    },
)  # fmt: skip
# One layer of full attention, beside what precedes and follows it.
_BESIDE = Family(
    "mtp.",
    "layers.0.",
    {
        "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc",
        "norm": "norm", "embeddings": "embed_tokens", "lm_head": "lm_head",
    },
)  # fmt: skip
FAMILIES = {
    "deepseek_v3": _APPENDED,
    "glm4_moe": _APPENDED,
    "glm4_moe_lite": _APPENDED,
    "qwen3_next": _BESIDE,
}


class Checkpoint(NamedTuple):
    """The safetensors files of a checkpoint, and which tensors they hold.

    Attributes:
        folder: theirs.
        config: of the target.
        family: its own.
        prefixes: of the names of each layer of multi-token prediction, at least one.
        files: the file of each tensor of these layers.
    """

    folder: Path
    config: Any
    family: Family
    prefixes: list[str]
    files: dict[str, str]

    def state(self) -> tuple[Any, ...]:
        """What differs after its files were changed."""
        stats = [(name, (self.folder / name).stat()) for name in sorted({*self.files.values()})]
        return self.folder, *((name, one.st_mtime_ns, one.st_size) for name, one in stats)


def folder_of(config: Any) -> Path:
    """The folder that a model of this configuration was loaded from.

    Raises:
        ValueError: a model that was not loaded from files.
    """
    name = getattr(config, "_name_or_path", None)
    if not name:
        raise ValueError(
            "drafter mtp reads the folder that the target was loaded from, and the target was not "
            "loaded from one; name the folder as mtp:FOLDER"
        )
    if Path(name).is_dir():
        return Path(name)
    for file in (INDEX, WEIGHTS):
        try:
            held = try_to_load_from_cache(
                name, file, revision=getattr(config, "_commit_hash", None)
            )
        except ValueError:
            break  # no name of the hub
        if isinstance(held, str):
            return Path(held).parent
    raise ValueError(
        f"drafter mtp reads the folder that the target was loaded from, and {name!r} is neither a "
        "folder nor kept by the hub's cache; name the folder as mtp:FOLDER"
    )


def find_checkpoint(folder: Path) -> Checkpoint:
    """The layers of multi-token prediction in a folder.

    Raises:
        ValueError: a folder that cannot be read, of a model type that is not known here, or without
            such layers.
    """
    if folder.is_file():
        raise ValueError(f"drafter mtp must name a folder, {folder} is a file")
    if not folder.is_dir():
        raise ValueError(f"folder {folder} of drafter mtp does not exist")
    # A published index names a hundred thousand tensors, and every call asks for its checkpoint.
    paths = (folder / name for name in (CONFIG, INDEX, WEIGHTS))
    stats = (path.stat() if path.is_file() else None for path in paths)
    found = _find(folder, tuple(one and (one.st_mtime_ns, one.st_size) for one in stats))
    missing = sorted({name for name in found.files.values() if not (folder / name).is_file()})
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which its {INDEX} names")
    return found


@functools.lru_cache(maxsize=4)
def _find(folder: Path, stamps: tuple[Any, ...]) -> Checkpoint:
    """The checkpoint in a folder whose files have these times and sizes."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot read the config.json of {folder}: {reason}") from error
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"drafter mtp knows the model types {', '.join(FAMILIES)}, got {config.model_type!r}"
        )
    files = _files_of(folder)
    prefixes = family.prefixes(files, config.num_hidden_layers)
    if not prefixes:
        wanted = family.prefix.format(config.num_hidden_layers)
        raise ValueError(
            f"{folder} holds no layers of multi-token prediction: no tensor's name begins with "
            f"{wanted}"
        )
    declared = getattr(config, "num_nextn_predict_layers", None)
    if declared not in (None, len(prefixes)):
        raise ValueError(
            f"{folder} must hold as many layers of multi-token prediction as num_nextn_predict_"
            f"layers of its config.json, {declared}, got {len(prefixes)}"
        )
    ours = {name: file for name, file in files.items() if name.startswith(tuple(prefixes))}
    return Checkpoint(folder, config, family, prefixes, ours)


def load_mtp(source: str | Path | Checkpoint, dtype: torch.dtype = torch.float32) -> MtpHead:
    """The layers of multi-token prediction of a checkpoint, on the host.

    Args:
        source: the checkpoint, or its folder.
        dtype: of the weights. What a layer keeps beside them, such as the bias by which
            experts are chosen, is in float32.

    Raises:
        ValueError: as `find_checkpoint`; tensors that are missing, unknown, quantised, not finite,
            or of wrong shapes, by name.
    """
    found = source if isinstance(source, Checkpoint) else find_checkpoint(Path(source))
    config = _config_of_layers(found.config, len(found.prefixes))
    # The decoder has no storage: its layers get the tensors of the files. Drawing none of the
    # weights that these replace leaves the generator of the calls' seeds as it is.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.float32
        )
        decoder = model.get_decoder()
        norm = type(decoder.norm)
        blocks = [MtpBlock(layer, norm, model.config) for layer in decoder.layers]
    for block, prefix in zip(blocks, found.prefixes, strict=True):
        _fill(block, found, prefix, dtype)
    return MtpHead(MtpConfig(model.config), blocks).eval().requires_grad_(False)


def _config_of_layers(config: Any, count: int) -> Any:
    """The configuration of a decoder of layers as those of multi-token prediction alone.

    They have experts, and full attention where layers differ in it.
    """
    made = copy.deepcopy(config)
    made.num_hidden_layers = count
    if getattr(made, "layer_types", None) is not None:
        made.layer_types = ["full_attention"] * count
    if getattr(made, "mlp_layer_types", None) is not None:
        made.mlp_layer_types = ["sparse"] * count
    if hasattr(made, "first_k_dense_replace"):
        made.first_k_dense_replace = 0
    return made


def _fill(block: MtpBlock, found: Checkpoint, prefix: str, dtype: torch.dtype) -> None:
    """Give a block the tensors of one layer."""
    family, size = found.family, [found.config.vocab_size, found.config.hidden_size]
    held = _read(found, prefix)
    own, weights = block.state_dict(), {name for name, _ in block.named_parameters()}
    parts = {
        name: _parts(family.published(name), list(tensor.shape), held)
        for name, tensor in own.items()
    }
    expected = {name: shape for part in parts.values() for name, shape in part.items()}
    shared = {name: f"{family.names[name]}.weight" for name in _SHARED}
    expected |= dict.fromkeys(shared.values(), size)
    check_tensors(
        {prefix + name: tensor for name, tensor in held.items()},
        {prefix + name: shape for name, shape in expected.items()},
        {prefix + name for name in shared.values()},
        found.folder,
        "layer of multi-token prediction",
    )
    for name, tensor in own.items():
        joined = torch.cat([held.pop(part) for part in parts[name]]).reshape(tensor.shape)
        own[name] = joined.to(dtype if name in weights else torch.float32)
    block.load_state_dict(own, assign=True)
    for name, published in shared.items():
        if published in held:
            setattr(block, name, held[published].to(dtype))


def _parts(name: str, shape: list[int], held: Mapping[str, Any]) -> dict[str, list[int]]:
    """The tensors of a file that a parameter is made of, one after the other, and their shapes.

    Files have a tensor for each expert, and Transformers has one for all.
    """
    stem, experts, kind = name.rpartition("mlp.experts.")
    if not experts or name in held or len(shape) != 3:
        return {name: shape}
    number, rows, width = shape
    projections = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    each = [rows // len(projections), width]
    return {
        f"{stem}{experts}{expert}.{projection}.weight": each
        for expert in range(number)
        for projection in projections
    }


def _read(found: Checkpoint, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names have a prefix, by the rest of their names."""
    by_file: dict[str, list[str]] = {}
    for name, file in found.files.items():
        if name.startswith(prefix) and not name.endswith(_UNUSED):
            by_file.setdefault(file, []).append(name)
    tensors: dict[str, torch.Tensor] = {}
    for file_name, names in by_file.items():
        with opened(found.folder / file_name) as file:
            for name in names:
                dtype = file.get_slice(name).get_dtype()
                if dtype not in _DTYPES:
                    raise ValueError(
                        f"{name} of {found.folder / file_name} must be in {', '.join(_DTYPES)}, "
                        f"got {dtype}: drafter mtp reads no quantised weights"
                    )
            for name in names:
                tensors[name.removeprefix(prefix)] = file.get_tensor(name)
    return tensors


def _files_of(folder: Path) -> dict[str, str]:
    """The file of each tensor of a checkpoint."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / WEIGHTS).is_file():
            raise ValueError(f"{folder} holds no safetensors: it has neither {WEIGHTS} nor {INDEX}")
        with opened(folder / WEIGHTS) as file:
            return dict.fromkeys(file.keys(), WEIGHTS)
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"cannot read the weight_map of {index}: {error!r}") from error
    beside = isinstance(files, dict) and all(
        isinstance(name, str) and Path(name).name == name for name in files.values()
    )
    if not beside:
        raise ValueError(f"weight_map of {index} must name files beside it")
    return dict(files)
