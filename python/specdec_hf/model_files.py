"""Models, configurations and tokenizers from folders and GGUF files."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from specdec_hf.model_paths import MissingModelError, model_path
from specdec_hf.runner.model_record import record_of
from specdec_hf.runner.packed.blocks import BlockFile

# The GGUF file that a folder was converted from, in the folder.
CONVERTED_FROM = "converted-from.gguf"

TOKENIZER_FILES = ("token*", "vocab*", "merges.txt", "*.model", "*.spm", "tekken.json")


def load_config(path: Path) -> Any:
    """The configuration in a folder or GGUF file.

    Raises:
        MissingModelError: it cannot be read.
    """
    with _naming("the configuration", path):
        return transformers.AutoConfig.from_pretrained(**files_of(path))


def load_tokenizer(path: Path) -> Any:
    """The tokenizer in a folder or GGUF file.

    Raises:
        MissingModelError: it cannot be read.
    """
    with _naming("a tokenizer", path):
        return transformers.AutoTokenizer.from_pretrained(**files_of(path))


def holds_tokenizer(path: Path) -> bool:
    """Whether a folder has any file of a tokenizer; a GGUF file always has one."""
    return path.is_file() or any(file for name in TOKENIZER_FILES for file in path.glob(name))


def load_model(
    path: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str = torch.float32,
    progress: Callable[[str], None] | None = None,
) -> Any:
    """The language model in a folder or GGUF file, in eval mode: causal, or an encoder-decoder.

    On a CPU the loop multiplies by the blocks of the file, where they are the model's weights.

    Args:
        path: folder, or a file whose weights are dequantised. A folder that was converted from such
            a file may hold it, or a link to it, as `CONVERTED_FROM`.
        device: where the model goes.
        dtype: of its weights; "auto" is that of the file.
        progress: called with a short text while a GGUF file is read.

    Raises:
        MissingModelError: it cannot be read, or lacks weights of the model, which Transformers
            would draw at random.
    """
    with _naming("a model", path), _quiet(), gguf_progress(progress, f"reading {path.name}"):
        kind: Any = transformers.AutoModelForCausalLM
        if path.is_dir() and load_config(path).is_encoder_decoder:
            kind = transformers.AutoModelForSeq2SeqLM
        model, found = kind.from_pretrained(
            **files_of(path), **dequantised(path), dtype=dtype, output_loading_info=True
        )
        if found["missing_keys"]:
            listed = sorted(found["missing_keys"])
            raise ValueError(
                f"it lacks {len(listed)} weights of {type(model).__name__}, such as {listed[0]}"
            )
    file = path / CONVERTED_FROM if path.is_dir() else path
    if file.is_file():
        record_of(model).blocks = BlockFile(file.resolve())
    return model.to(device).eval()


def load_gguf(
    path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file, in eval mode on the CPU.

    The loop multiplies by the blocks of the file where the model is in float32; see
    docs/forwards.md#packed-weights.

    Args:
        path: the file; ~ is the home folder.
        dtype: of the weights.

    Raises:
        MissingModelError: there is no such file, or it cannot be read.
        ValueError: a file of another kind.

    >>> from specdec_hf import generate, load_gguf
    >>> model, tokenizer = load_gguf("model.gguf")  # doctest: +SKIP
    """
    file = model_path(path)
    if file is None or file.is_dir():
        raise MissingModelError(f"path must be a GGUF file, got {os.fspath(path)}")
    return load_model(file, dtype=dtype), load_tokenizer(file)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of Transformers."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def files_of(path: Path) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` for a folder, or for a GGUF file."""
    if path.is_dir():
        return {"pretrained_model_name_or_path": path, "local_files_only": True}
    return {
        "pretrained_model_name_or_path": path.parent, "gguf_file": path.name,
        "local_files_only": True,
    }  # fmt: skip


def dequantised(path: Path) -> dict[str, Any]:
    """Ask for the plain weights of a GGUF file: packed ones need kernels from the hub."""
    if path.is_dir():
        return {}
    return {"quantization_config": transformers.GgufConfig(gguf_file=path.name, dequantize=True)}


@contextlib.contextmanager
def _naming(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # a damaged file raises whatever its reader happens to raise
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise MissingModelError(f"cannot load {what} from {path}: {first_line}") from error


@contextlib.contextmanager
def gguf_progress(say: Callable[[str], None] | None, text: str) -> Iterator[None]:
    """Send the GGUF reader's own progress bar to ``say``; no setting of transformers mutes it."""
    reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    original = reader.tqdm

    def report(items: Iterable[Any], **_: Any) -> Iterator[Any]:
        listed = list(items)
        for done, item in enumerate(listed, start=1):
            yield item
            if say is not None:
                say(f"{text}: tensor {done} of {len(listed)}")

    reader.tqdm = report
    try:
        yield
    finally:
        reader.tqdm = original
