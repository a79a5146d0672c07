"""What the command ``bench`` compares with: other ways to generate from the same weights.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import torch
from specdec_hf.cli.load import Loaded
from specdec_hf.cli.sources import Source, embedded_gguf
from specdec_hf.options import DEFAULT_NUM_ASSISTANT_TOKENS
from specdec_hf.runner.protocol import is_encoder_decoder

from specdec_lab.bench.baselines import BestOf, RejectionSampling
from specdec_lab.bench.runs import Config

CHAINS = 4  # of the baseline "best_of"


class LeftOutError(Exception):
    """A peer cannot take part; the message says why."""


def make_peer(name: str, loaded: Loaded, source: Source) -> Config:
    """The config of one ``--peer``.

    Args:
        name: one of `specdec_lab.bench.command.PEERS`.
        loaded: the target and the drafters.
        source: where the target came from.

    Raises:
        LeftOutError: the peer cannot generate from this target.
    """
    if name == "prompt_lookup":
        arguments = {"prompt_lookup_num_tokens": DEFAULT_NUM_ASSISTANT_TOKENS}
        return Config("prompt lookup, Transformers", arguments=arguments, single=True, peer=True)
    if name == "assisted":
        return Config(
            "assisted, Transformers",
            arguments={"assistant_model": _draft_model(loaded)},
            single=True,
            peer=True,
        )
    if name == "rejection":
        rejection = RejectionSampling(*_decoders(loaded), DEFAULT_NUM_ASSISTANT_TOKENS)
        return Config("rejection sampling, A.2", model=rejection, single=True, peer=True)
    if name == "best_of":
        best = BestOf(*_decoders(loaded), DEFAULT_NUM_ASSISTANT_TOKENS, CHAINS)
        return Config(f"best of {CHAINS} chains", model=best, single=True, peer=True)
    if name == "compiled":
        static = {"cache_implementation": "static"}
        twin = copy.copy(loaded.model)  # over the same weights
        twin.forward = torch.compile(twin.forward)
        return Config("compiled, Transformers", arguments=static, model=twin, peer=True)
    if source.kind == "folder":
        raise LeftOutError(f"it needs a GGUF file, and {source.title} is a folder")
    path = embedded_gguf() if source.kind == "embedded" else source.path
    llama = LlamaCpp(path, loaded.model.device)
    return Config(f"llama.cpp, {llama.weights}", model=llama, single=True, peer=True)


def _draft_model(loaded: Loaded) -> Any:
    """The first draft model of the target's vocabulary."""
    drafts = filter(None, loaded.draft_models())
    model = next((one.model for one in drafts if one.shares_vocabulary), None)
    if model is None:
        raise LeftOutError("it needs a --drafter that is a model of the target's vocabulary")
    return model


def _decoders(loaded: Loaded) -> tuple[Any, Any]:
    """The target and the draft model of a baseline, which knows no encoder."""
    models = loaded.model, _draft_model(loaded)
    for one in models:
        if is_encoder_decoder(one):
            raise LeftOutError(f"it needs decoder-only models, got {type(one).__name__}")
    return models


class LlamaCpp:
    """`generate` of llama.cpp's Python binding, on the file that the target was converted from.

    Attributes:
        weights: type of the weights in the file, such as ``Q4_1``.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        if device.type != "cpu":
            raise LeftOutError(f"it runs on the CPU, and the target is on {device}")
        try:
            binding = importlib.import_module("llama_cpp")
        except (ImportError, OSError, RuntimeError) as error:
            raise LeftOutError(f"llama_cpp cannot be imported: {error}") from error
        from gguf import GGUFReader, LlamaFileType  # noqa: PLC0415  # takes a while

        field = GGUFReader(path).get_field("general.file_type")
        kind = "weights of unknown type" if field is None else LlamaFileType(field.contents()).name
        self.weights = kind.removeprefix("MOSTLY_").removeprefix("ALL_")
        threads = torch.get_num_threads()
        self._llama = binding.Llama(
            str(path), n_ctx=0, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        do_sample: bool,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        **_: Any,
    ) -> torch.Tensor:
        """[1, W] token ids of one prompt and its answer."""
        prompt = input_ids[0].tolist()
        self._llama.reset()  # so that it reads the prompt again
        stream = self._llama.generate(
            prompt,
            temp=temperature if do_sample else 0.0,
            top_k=top_k,
            top_p=top_p,
            min_p=0.0,
            repeat_penalty=1.0,
        )
        new: list[int] = []
        for token in stream:
            new.append(token)
            if len(new) == max_new_tokens or token == self._llama.token_eos():
                break
        return torch.tensor([prompt + new])
