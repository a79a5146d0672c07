"""What the command ``bench`` compares with: other ways to generate from the same weights.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from specdec_hf.cli.load import Loaded
from specdec_hf.cli.sources import Source, embedded_gguf
from specdec_hf.options import DEFAULT_NUM_ASSISTANT_TOKENS
from specdec_hf.runner.protocol import is_encoder_decoder

from specdec_lab.bench.baselines import BestOf, RejectionSampling
from specdec_lab.bench.peer_process import LeftOutError, PeerProcess
from specdec_lab.bench.runs import Config

CHAINS = 4  # of the baseline "best_of"
OPENVINO = "SPECDEC_PEER_OPENVINO"


def make_peers(name: str, loaded: Loaded, source: Source) -> list[Config]:
    """The configs of one ``--peer``.

    Args:
        name: one of `specdec_lab.bench.command.PEERS`.
        loaded: the target and the drafters.
        source: where the target came from.

    Raises:
        LeftOutError: the peer cannot generate from this target.
    """
    if name == "prompt_lookup":
        arguments = {"prompt_lookup_num_tokens": DEFAULT_NUM_ASSISTANT_TOKENS}
        title = "prompt lookup, Transformers"
        return [Config(title, arguments=arguments, single=True, peer=True)]
    if name == "assisted":
        arguments = {"assistant_model": _draft_model(loaded)}
        return [Config("assisted, Transformers", arguments=arguments, single=True, peer=True)]
    if name == "rejection":
        rejection = RejectionSampling(*_decoders(loaded), DEFAULT_NUM_ASSISTANT_TOKENS)
        return [Config("rejection sampling, A.2", model=rejection, single=True, peer=True)]
    if name == "best_of":
        best = BestOf(*_decoders(loaded), DEFAULT_NUM_ASSISTANT_TOKENS, CHAINS)
        return [Config(f"best of {CHAINS} chains", model=best, single=True, peer=True)]
    if name == "compiled":
        static = {"cache_implementation": "static"}
        twin = copy.copy(loaded.model)  # over the same weights
        twin.forward = torch.compile(twin.forward)
        return [Config("compiled, Transformers", arguments=static, model=twin, peer=True)]
    if name == "openvino":
        folder = os.environ.get(OPENVINO)
        if not folder:
            raise LeftOutError(
                f"${OPENVINO} must name a folder with the converted model, which "
                "`optimum-cli export openvino --model FOLDER OUTPUT` writes"
            )
        path, weights, kinds = Path(folder), Path(folder).name, [name, f"{name}, prompt lookup"]
    else:
        if source.kind == "folder":
            raise LeftOutError(f"it needs a GGUF file, and {source.title} is a folder")
        path = embedded_gguf() if source.kind == "embedded" else source.path
        weights, kinds = _gguf_type(path), [name]
    peers = [(kind, PeerProcess(kind, path, loaded)) for kind in kinds]
    return [
        Config(f"{kind}, {weights}, {peer.name}", model=peer, single=True, peer=True)
        for kind, peer in peers
    ]


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


def _gguf_type(path: Path) -> str:
    """Type of the weights in a file, such as ``Q4_1``."""
    from gguf import GGUFReader, LlamaFileType  # noqa: PLC0415  # takes a while

    field = GGUFReader(path).get_field("general.file_type")
    kind = "weights of unknown type" if field is None else LlamaFileType(field.contents()).name
    return kind.removeprefix("MOSTLY_").removeprefix("ALL_")
