"""Which of the loop's own options go together, for calls without beams."""

from __future__ import annotations

from specdec_hf.cache.choose import check_kind
from specdec_hf.decode.session import Options
from specdec_hf.drafters.checks import describe
from specdec_hf.drafters.drafter import Drafter
from specdec_hf.hf_arguments.call import Call


def check_options(call: Call, options: Options, drafter: Drafter | None) -> None:
    """Raises ValueError for options that do not go together, by name."""
    if options.num_assistant_beams is not None:
        raise ValueError(
            f"num_assistant_beams must be None without num_beams, got {options.num_assistant_beams}"
        )
    forwards = drafter is not None and drafter.makes_forward
    trees = drafter is not None and drafter.size > 0
    if "hidden_states" in call.outputs and forwards:
        raise ValueError(
            "output_hidden_states must be False with a drafter that makes the target's forward "
            f"itself, got {describe(drafter)}"
        )
    if options.compile and forwards:
        raise ValueError(
            "compile must be False with a drafter that makes the target's forward itself, "
            f"got True with {describe(drafter)}"
        )
    check_kind(options.cache)
    if options.fixed_width is not None:
        _check_fixed_width(options, drafter, forwards=forwards, trees=trees)
    if trees:
        _check_tree_options(options)


def _check_fixed_width(
    options: Options, drafter: Drafter | None, *, forwards: bool, trees: bool
) -> None:
    width = options.fixed_width
    if trees:
        raise ValueError(
            f"fixed_width must be None with tree, got {width}: the nodes of a tree lie in other "
            "slots than the text, and the sums of attention then round otherwise"
        )
    if forwards:
        raise ValueError(
            "fixed_width must be None with a drafter that makes the target's forward itself, "
            f"got {width} with {describe(drafter)}"
        )
    if options.cache not in ("auto", "spec"):
        raise ValueError(f"cache must be 'auto' or 'spec' with fixed_width, got {options.cache!r}")


def _check_tree_options(options: Options) -> None:
    if options.num_assistant_tokens is not None:
        raise ValueError(
            "num_assistant_tokens must not be given with a drafter of trees, which says what is "
            f"drafted, got {options.num_assistant_tokens}"
        )
    if options.trace is not None:
        raise ValueError("trace must be None with tree: only rounds of chains are traced")
    if options.cache not in ("auto", "spec"):
        raise ValueError(f"cache must be 'auto' or 'spec' with tree, got {options.cache!r}")
