"""The config.json of vLLM's library speculators, from and to that of the published layout."""

from __future__ import annotations

from typing import Any

TYPE = "speculators_model_type"
# The release whose fields are written.
VERSION = "0.9.0"
SPECULATIVE_TOKENS = 3  # how many tokens vLLM drafts where its user says nothing
_OUTER = (
    "draft_vocab_size", "norm_before_residual", "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
)  # fmt: skip
_REFUSED = ("norm_before_fc", "fc_norm", "norm_output")


def is_speculators(given: dict[str, Any]) -> bool:
    """Whether a config.json has this layout."""
    return TYPE in given


def from_speculators(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of the published layout.

    Raises:
        ValueError: another kind of head, or a field that is missing, by name.
    """
    if given[TYPE] != "eagle3":
        raise ValueError(f"{TYPE} of a head must be eagle3, got {given[TYPE]!r}")
    layer = given.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError("config.json of a head must hold transformer_layer_config")
    if "norm_before_residual" not in given:  # the library and vLLM differ in its default
        raise ValueError("config.json of a head must hold norm_before_residual")
    return {**layer, **{name: given[name] for name in (*_OUTER, *_REFUSED) if name in given}}


def to_speculators(published: dict[str, Any], verifier: Any) -> dict[str, Any]:
    """The content of config.json.

    Args:
        published: that of the published layout.
        verifier: the target's config; its name says where vLLM finds it.
    """
    outer = {name: published[name] for name in _OUTER if name in published}
    inner = {
        name: value
        for name, value in published.items()
        if name not in (*_OUTER, "architectures", "eagle_config")
    }
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS,
        "accept_tolerance": 0.0, "verifier_accept_k": 1,
    }  # fmt: skip
    return {
        "architectures": ["Eagle3Speculator"],
        TYPE: "eagle3",
        "speculators_version": VERSION,
        **outer,
        **dict.fromkeys(_REFUSED, False),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": verifier.name_or_path or None,
                "architectures": list(verifier.architectures or []),
            },
        },
    }
