"""Which acceptance rule a call uses, by name or from how drafts are drawn."""

from __future__ import annotations

RULES = ("token", "block", "greedy", "match")


def resolve_rule(acceptance: str, do_sample: bool, sampled_drafts: bool) -> str:
    """The acceptance rule: "auto" is greedy without sampling, and with it the rule that accepts
    most: block where drafts are drawn from a law, token where each was certain.

    Raises:
        ValueError: unknown rule, or greedy acceptance of sampled text, which would not be lossless.
    """
    if acceptance == "auto":
        return ("block" if sampled_drafts else "token") if do_sample else "greedy"
    if acceptance not in RULES:
        raise ValueError(
            f"acceptance must be 'auto', {', '.join(map(repr, RULES))}, got {acceptance!r}"
        )
    if acceptance == "greedy" and do_sample:
        raise ValueError(
            "acceptance='greedy' needs do_sample=False: it would not keep the sampled law"
        )
    return acceptance


def resolve_tree_rule(acceptance: str, do_sample: bool, rules: tuple[str, ...]) -> str:
    """The acceptance rule of a tree: "auto" is greedy without sampling, and with it the first of
    the lossless ``rules`` that the tree's drafter draws for.

    Raises:
        ValueError: another rule, or greedy acceptance of sampled text, which would not be lossless.
    """
    if acceptance == "auto":
        return rules[0] if do_sample else "greedy"
    if acceptance not in rules:
        raise ValueError(
            "acceptance must be 'auto', "
            f"{', '.join(map(repr, rules))} with this tree and drafter, got {acceptance!r}"
        )
    if acceptance == "greedy" and do_sample:
        raise ValueError(
            "acceptance='greedy' needs do_sample=False: it would not keep the sampled law"
        )
    return acceptance
