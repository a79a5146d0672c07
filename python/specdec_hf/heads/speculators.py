"""The layout of vLLM's library speculators: what config.json says of all its kinds of heads.

The fields of the decoder layers are nested in ``transformer_layer_config``, those of drafting in
``speculators_config``, and ``speculators_model_type`` names the kind. It is that of version 0.9.
"""

from __future__ import annotations

from typing import Any

from specdec_hf.arguments import Refused

TYPE = "speculators_model_type"
VERSION = "0.9.0"
DECODER = "transformer_layer_config"
_DRAFTING = "speculators_config"
# Kinds that a drafter of the same name reads.
_READ = ("eagle3", "peagle", "dflash")


def check_kind(given: dict[str, Any], kind: str) -> None:
    """Raise ValueError for a config.json of another kind; it names the drafter that reads it."""
    if given[TYPE] != kind:
        other = f", which drafter {given[TYPE]} reads" if given[TYPE] in _READ else ""
        raise Refused(f"{TYPE} of a head must be {kind}, got {given[TYPE]!r}{other}")


def decoder_fields(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of the decoder layers; raises ValueError where config.json has none."""
    inner = given.get(DECODER)
    if not isinstance(inner, dict):
        raise Refused(f"config.json of a head must hold {DECODER}")
    return inner


def speculative_tokens(given: dict[str, Any]) -> Any:
    """How many tokens the first way of drafting makes, or None where config.json does not say."""
    drafting = given.get(_DRAFTING)
    methods = drafting.get("proposal_methods") if isinstance(drafting, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    return first.get("speculative_tokens") if isinstance(first, dict) else None


def outer_fields(
    kind: str, architecture: str, inner: dict[str, Any], tokens: int, verifier: Any
) -> dict[str, Any]:
    """The content of config.json that kinds share.

    Args:
        kind: the name of the kind.
        architecture: the class that vLLM makes of it.
        inner: the fields of the decoder layers.
        tokens: how many a round drafts.
        verifier: the target's config, whose name says where vLLM finds it; None names no target.
    """
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": tokens,
        "accept_tolerance": 0.0, "verifier_accept_k": 1,
    }  # fmt: skip
    return {
        "architectures": [architecture],
        TYPE: kind,
        "speculators_version": VERSION,
        "tie_word_embeddings": False,
        DECODER: inner,
        _DRAFTING: {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": (verifier.name_or_path or None) if verifier else None,
                "architectures": list(verifier.architectures or []) if verifier else [],
            },
        },
    }
