"""What the environment variables of the plug-in say."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

ServedRule = Literal["token", "block", "match", "typical"]
# The rules of `verify_chain` that a server may use.
RULES: tuple[ServedRule, ...] = get_args(ServedRule)
# The drafters of `Proposer`, with the names that they have in specdec_hf.
DRAFTERS = ("prompt_lookup", "suffix_automaton", "suffix_automaton:FILE", "rest:FILE")


class DrafterName(NamedTuple):
    """What `SPECDEC_VLLM_DRAFTER` names, as in ``rest:store``: a drafter and its datastore."""

    kind: str
    file: str = ""


@dataclass(frozen=True)
class Settings:
    """How the plug-in verifies, and what `Proposer` drafts with.

    enabled: whether it replaces anything in vLLM (`SPECDEC_VLLM`).
    rule: one of `RULES` (`SPECDEC_VLLM_RULE`), or None for what the `rejection_sample_method` of
        vLLM's `speculative_config` says: rule block for "block" and rule token for "standard".
    typical_epsilon, typical_delta: of rule typical (`SPECDEC_VLLM_TYPICAL_EPSILON` and `_DELTA`).
    drafter: one of `DRAFTERS` (`SPECDEC_VLLM_DRAFTER`), or None, which is suffix_automaton to a
        `Proposer`.
    """

    enabled: bool = True
    rule: ServedRule | None = None
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    drafter: DrafterName | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the environment variables, whose names begin with `SPECDEC_VLLM`.

        Args:
            environment: in place of that of the process.

        Raises:
            ValueError: a variable has a value that is not allowed, or an unknown name.

        >>> Settings.from_environment({"SPECDEC_VLLM_RULE": "match"}).rule
        'match'
        """
        every = os.environ if environment is None else environment
        ours = {name: text for name, text in every.items() if name.startswith(_PREFIX)}
        if unknown := ours.keys() - set(_NAMES):
            raise ValueError(
                f"environment variables of specdec_vllm must be of {', '.join(_NAMES)}, "
                f"got {min(unknown)}"
            )
        rule = _rule(ours)
        for name in (_EPSILON, _DELTA):
            if rule != "typical" and name in ours:
                given = f"with {_RULE}={rule}" if rule else f"without {_RULE}"
                raise ValueError(f"{name} is for {_RULE}=typical alone, got {ours[name]!r} {given}")
        return cls(
            enabled=_flag(ours),
            rule=rule,
            typical_epsilon=_number(ours, _EPSILON, cls.typical_epsilon, 1.0),
            typical_delta=_number(ours, _DELTA, cls.typical_delta, _LARGEST_DELTA),
            drafter=_drafter(ours),
        )


_PREFIX = "SPECDEC_VLLM"
_RULE, _EPSILON, _DELTA, _DRAFTER = (
    f"{_PREFIX}_{name}" for name in ("RULE", "TYPICAL_EPSILON", "TYPICAL_DELTA", "DRAFTER")
)
_LARGEST_DELTA = 1e9  # above exp(H) of any vocabulary; the op wants a finite number
_NAMES = (_PREFIX, _RULE, _EPSILON, _DELTA, _DRAFTER)


def _flag(environment: Mapping[str, str]) -> bool:
    text = environment.get(_PREFIX, "1")
    if text not in ("0", "1"):
        raise ValueError(f"{_PREFIX} must be 0 or 1, got {text!r}")
    return text == "1"


def _rule(environment: Mapping[str, str]) -> ServedRule | None:
    text = environment.get(_RULE)
    for rule in RULES:
        if text == rule:
            return rule
    if text is not None:
        raise ValueError(f"{_RULE} must be one of {', '.join(RULES)}, got {text!r}")
    return None


def _drafter(environment: Mapping[str, str]) -> DrafterName | None:
    text = environment.get(_DRAFTER)
    if text is None:
        return None
    kind, colon, file = text.partition(":")
    if (f"{kind}:FILE" if colon else kind) not in DRAFTERS or (colon and not file):
        raise ValueError(f"{_DRAFTER} must be one of {', '.join(DRAFTERS)}, got {text!r}")
    if re.search(r"(^|,)keep=", file):
        raise ValueError(
            f"{_DRAFTER} must not have keep=, because the drafts of a request must not depend on "
            f"the texts of others, got {text!r}"
        )
    return DrafterName(kind, file)


def _number(environment: Mapping[str, str], name: str, default: float, largest: float) -> float:
    text = environment.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= largest:
        raise ValueError(f"{name} must be a number in [0, {largest:g}], got {text!r}")
    return value
