"""The choice of the acceptance rule. The rules themselves are explained in docs/rules.md."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_hf.arguments import did_you_mean


def resolve_rule(rule: str, do_sample: bool, supported: Sequence[str]) -> str:
    """The acceptance rule of a call.

    Args:
        rule: what the caller asked for. "auto" is greedy without sampling, else the first rule
            that the drafter supports.
        do_sample: whether the call samples.
        supported: the lossless rules that the drafter's drafts can be verified with, best first.

    Raises:
        ValueError: another rule, or greedy verification of sampled text, which is not lossless.
    """
    if rule == "auto":
        return supported[0] if do_sample else "greedy"
    if rule not in supported:
        raise ValueError(
            f"rule must be 'auto', {', '.join(map(repr, supported))} with this drafter, "
            f"got {rule!r}{did_you_mean(rule, supported)}"
        )
    if rule == "greedy" and do_sample:
        raise ValueError(
            "rule='greedy' needs do_sample=False: it would not keep the target's distribution"
        )
    return rule
