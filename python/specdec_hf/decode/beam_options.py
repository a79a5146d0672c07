"""The loop's own arguments, as far as beam search takes them."""

from __future__ import annotations

from typing import Any

from specdec_hf.arguments import shown
from specdec_hf.decode.session import DEFAULT_NUM_ASSISTANT_TOKENS, Options
from specdec_hf.drafters.layers import LayersDrafter
from specdec_hf.drafters.model import ModelDrafter
from specdec_hf.drafters.resolve import resolve_drafter
from specdec_hf.hf_arguments.call import Call


def check_beam_options(call: Call, options: Options) -> None:
    """Raises ValueError for an argument that does not go together with ``num_beams``, by name."""
    assert call.beams is not None
    beams = f"with num_beams={call.beams.num_beams}"
    allowed = {
        "rule": ("auto", "greedy"),
        "tree": (None,),
        "cache": ("auto", "spec"),
        "num_assistant_tokens_schedule": (None, "constant"),
        "trace": (None,),
        "compile": (False,),
        "fixed_width": (None,),
    }
    for name, values in allowed.items():
        value = getattr(options, name)
        if value not in values:
            listed = " or ".join(map(repr, values))
            raise ValueError(f"{name} must be {listed} {beams}, got {shown(value)}")
    if "hidden_states" in call.outputs:
        raise ValueError(f"output_hidden_states must be False {beams}, whose rows are no sequences")
    if call.past is not None:
        raise ValueError(f"past_key_values must be None {beams}")
    if call.prefill is not None:
        raise ValueError(f"{', '.join(call.prefill.names)} cannot be given {beams}")


def draft_model_of(model: Any, call: Call, options: Options) -> ModelDrafter | None:
    """The draft model of a beam search, None for beams without drafts.

    Raises:
        TypeError: not a drafter.
        ValueError: another drafter than a model, which has no beams.
    """
    assert call.beams is not None
    drafter = resolve_drafter(options.drafter, None, model)
    if drafter is None or type(drafter) is ModelDrafter or isinstance(drafter, LayersDrafter):
        return drafter
    raise ValueError(
        f"drafter must be None or a draft model with num_beams={call.beams.num_beams}, "
        f"got {drafter.name}"
    )


def draft_size(call: Call, options: Options) -> tuple[int, int]:
    """Steps gamma of a draft, and its beam width u.

    Raises:
        ValueError: fewer beams than the target has.
    """
    assert call.beams is not None
    width, number = options.num_assistant_beams, options.num_assistant_tokens
    least = call.beams.num_beams
    if width is not None and width < least:
        raise ValueError(f"num_assistant_beams must be at least num_beams={least}, got {width}")
    gamma = DEFAULT_NUM_ASSISTANT_TOKENS if number is None else number
    return gamma, 2 * least if width is None else width
