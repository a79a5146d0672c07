"""Heads on disk: config.json and one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specdec_hf.arguments import Refused, check_integer
from specdec_hf.heads.base import Head

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PICKLES = ("pytorch_model.bin", "model.pt", "model.pth", "model.bin", "medusa_lm_head.pt")
_INTEGERS = (torch.int64, torch.int32, torch.int16)
MAPS = ("d2t", "t2d")  # of the draft vocabulary; all others are weights

H = TypeVar("H", bound=Head)


def write_head(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    name: str = WEIGHTS,
) -> None:
    """Write config.json and a safetensors file, as what saves a head of some kind does.

    Args:
        folder: made where it is missing.
        config: the content of config.json.
        tensors: of the head, on any device and of any dtype.
        dtype: of the weights in the file.
        name: of the safetensors file.
    """
    tensors = {
        name: x.detach().to("cpu", dtype if x.is_floating_point() else x.dtype).contiguous()
        for name, x in tensors.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / name, {"format": "pt"})


def read_config(folder: Path) -> dict[str, Any]:
    """The object in a head's config.json; raises ValueError."""
    try:
        given = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Refused(f"cannot read a head's {folder / CONFIG}: {reason}") from error
    if not isinstance(given, dict):
        raise Refused(f"{folder / CONFIG} must hold an object, got {type(given).__name__}")
    return given


def read_weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a head's safetensors file; raises ValueError."""
    path = folder / name
    if not path.is_file():
        pickled = next((one for one in PICKLES if (folder / one).is_file()), None)
        if pickled is None:
            raise Refused(f"{folder} holds no head: {name} is missing")
        raise Refused(
            f"{folder / pickled} is a pickle, which may run any code when it is read; convert it "
            f"where you trust it: safetensors.torch.save_file(torch.load({pickled!r}, "
            f"weights_only=True), {name!r})"
        )
    with opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file whose errors are ValueErrors with its name."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise Refused(f"cannot read {path}: {error}") from error


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
        raise Refused(f"{path} {' and '.join(faults)}")
    for name, tensor in tensors.items():
        if list(tensor.shape) != expected[name]:
            raise Refused(f"{name} of {path} must be {expected[name]}, got {list(tensor.shape)}")
        if name in MAPS:
            continue
        if not tensor.is_floating_point():
            raise Refused(f"{name} of {path} must have a floating dtype, got {tensor.dtype}")
        if not tensor.float().isfinite().all():
            raise Refused(f"{name} of {path} must be finite, and some of its numbers are not")


def checked(name: str, value: Any, minimum: int = 1, maximum: int | None = None) -> int:
    """An integer of a config.json; ValueError where it is none, too small or too large."""
    try:
        return check_integer(name, value, minimum, maximum)
    except (TypeError, ValueError) as error:
        raise Refused(f"config.json: {error}") from None


def checked_size(
    given: dict[str, Any],
    name: str,
    default: int | None = None,
    minimum: int = 1,
    maximum: int | None = None,
) -> int:
    """An integer of a head's config.json; ValueError where it is missing or wrong."""
    value = given.get(name, default)
    if value is None:
        raise Refused(f"config.json of a head must hold {name}")
    return checked(name, value, minimum, maximum)


def checked_flag(given: dict[str, Any], name: str, *, default: bool = False) -> bool:
    """A truth value of a head's config.json; ValueError for another value, None is the default."""
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(f"config.json: {name} must be true or false, got {value!r}")
    return default if value is None else value


def draft_tokens(offsets: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The target's id of each draft token, from their differences; ValueError for wrong ones."""
    if offsets.dtype not in _INTEGERS:
        raise Refused(f"d2t must hold integers, got {offsets.dtype}")
    tokens = offsets.to(torch.int64) + torch.arange(len(offsets), device=offsets.device)
    different = len(tokens.unique())
    if different < len(tokens) or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise Refused(
            f"d2t must lead to different ids in [0, {vocab_size}), got {int(tokens.min())} to "
            f"{int(tokens.max())}, {different} of {len(tokens)} different"
        )
    return tokens


# Heads without a published layout: sizes in config.json, weights by the module's names.


def save_own(head: Head, folder: Path, names: Sequence[str], dtype: torch.dtype) -> None:
    """Write a head as `write_head` does, with the fields of its config under these names."""
    sizes = dict(zip(names, astuple(head.config), strict=True))
    given = {"architectures": [type(head).__name__], **sizes}
    write_head(folder, given, dict(head.state_dict()), dtype)


def load_own(
    folder: str | Path,
    names: Sequence[str],
    make: Callable[..., H],
    maxima: Mapping[str, int] = MappingProxyType({}),
) -> H:
    """A head from a folder, in float32 on the host.

    Args:
        folder: as it was written.
        names: of the sizes in config.json that ``make`` takes.
        make: gives the head whose weights are read.
        maxima: the largest value of some of the sizes.

    Raises:
        ValueError: a folder without such a head, or one whose config, names or shapes are wrong, by
            name.
    """
    folder = Path(folder)
    given, tensors = read_config(folder), read_weights(folder, WEIGHTS)
    head = make(*(checked_size(given, name, maximum=maxima.get(name)) for name in names))
    expected = {name: list(weight.shape) for name, weight in head.state_dict().items()}
    check_tensors(tensors, expected, frozenset(), folder / WEIGHTS, type(head).__name__)
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return head.eval()
