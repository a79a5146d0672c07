"""The loop's own options: name, type, default, text and check of each.

The signature of `generate` repeats names, types and defaults, which a test compares.

`generate` and `SpeculativeDecoder` take `Options`. The command line takes `CommonOptions`, reads
their texts and makes their checks. The list that docs/loop.md ends with is made of the texts.

This module does without torch, because the command line reads it before it loads torch.
"""

# ruff: noqa: RUF009  # option() makes a field
from __future__ import annotations

import inspect
import textwrap
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

from specdec_hf.arguments import (
    check_flag,
    check_integer,
    check_keeps,
    check_number,
    shown,
)
from specdec_hf.drafting.registry import AUTO
from specdec_hf.rules import ABLATIONS, CUSTOM_RULE, LOSSY_RULES
from specdec_hf.schedules.base import MAX_DRAFT_LENGTH, Schedule
from specdec_hf.schedules.benefit_guard import BenefitGuard

if TYPE_CHECKING:
    from specdec_hf.loop.streaming import Streamer, Trace

DEFAULT_NUM_ASSISTANT_TOKENS = 5

Function = TypeVar("Function", bound=Callable[..., Any])


def option(
    check: Callable[[str, Any], Any],
    text: str,
    *,
    default: Any = None,
    with_beams: tuple[Any, ...] | None = None,
) -> Any:
    """The field of a dataclass that is an option.

    Args:
        check: called with name and value; returns the value to keep, or raises an error by name.
        text: for users. Its first sentence begins the help of the command line. An address such as
            docs/loop.md#seeds becomes a link in the documents.
        default: of the option.
        with_beams: the values that calls with ``num_beams`` take, None for all.
    """
    metadata = {"check": check, "text": " ".join(text.split()), "with_beams": with_beams}
    return field(default=default, metadata=metadata)


def _keep(name: str, value: Any) -> Any:
    return value


def _or_none(check: Callable[..., Any], *limits: Any) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value, *limits)


def _number(rule: str, holds: Callable[[float], bool]) -> Callable[[str, Any], Any]:
    """A number that keeps its rule, or None."""

    def check(name: str, value: Any) -> float | None:
        if value is None:
            return None
        number = check_number(name, value)
        check_keeps(name, value, rule, holds)
        return number

    return check


def _must_be(rule: str, *types: Any) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, types):
            raise TypeError(f"{name} must be {rule}, got {shown(value)}")
        return value

    return check


def _none_or_one_of(*choices: str) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        _must_be("None or a string", NoneType, str)(name, value)
        if value not in (None, *choices):
            named = ", ".join(map(repr, choices))
            raise ValueError(f"{name} must be None or {named}, got {shown(value)}")
        return value

    return check


def _check_drafter(name: str, value: Any) -> Any:
    from specdec_hf.drafters.resolve import check_drafter_types  # noqa: PLC0415  # loads torch

    check_drafter_types(value)
    return value


def _layout(name: str, value: Any) -> Any:
    if value is None:
        return None
    from specdec_hf.trees import as_layout  # noqa: PLC0415  # rarely asked for

    return as_layout(value)


def _check_streamer(name: str, value: Any) -> Any:
    methods = (getattr(value, method, None) for method in ("put", "end"))
    if not (value is None or all(map(callable, methods))):
        raise TypeError(
            f"{name} must be None or an object with put() and end(), got {shown(value)}"
        )
    return value


@dataclass(frozen=True)
class CommonOptions:
    """The options that the command line has too; `specdec_hf.cli.checks.Settings` words them."""

    drafter: Any = option(
        _check_drafter,
        """what drafts. "auto" is a tree of copied text and, where the model has one, the drafts of
        a head; see docs/loop.md#the-default-drafter. None is plain decoding. Else the name of a
        drafter such as "prompt_lookup" or "ngram:2" (see docs/drafters.md), a causal LM of the same
        vocabulary, the folder of such a model or of a head, or a `Drafter`, which may draft trees
        of its own. With ``tree`` also a list of them; without it, a list of draft models from large
        to small, the last of which may be any drafter that rolls back; see
        docs/drafters.md#drafters-made-from-models.""",
        default=AUTO,
    )
    _: KW_ONLY
    num_assistant_tokens: int | None = option(
        _or_none(check_integer, 0, MAX_DRAFT_LENGTH),
        f"""tokens to draft per round. ``gamma`` and ``num_speculative_tokens`` are aliases. Not
        with ``tree``, which says what is drafted. None is the value of the generation config, or
        {DEFAULT_NUM_ASSISTANT_TOKENS}.""",
    )
    num_assistant_tokens_schedule: str | Schedule | None = option(
        _must_be("a string or a Schedule", NoneType, str, Schedule),
        """how much to draft. A name, a name with parameters such as "egag:gamma_max=8,beta=0.5", or
        a `Schedule`; see docs/loop.md#schedules. With trees "constant" or "optimal". None is
        "optimal" for the tree of drafter "auto", else "constant".""",
        with_beams=(None, "constant"),
    )
    rule: Any = option(
        _must_be("a string or a function", str, Callable),
        """acceptance rule. "token", "block", "greedy", or "match", whose sampled output equals
        plain decoding with the same seed; with ``tree`` one of the lossless rules of
        `specdec_kernels.verify_tree`; see docs/rules.md. A function is a rule of your own, which is
        never counted lossless; see docs/rules.md#a-rule-of-your-own. Others are lossy; see
        docs/loop.md#lossy-rules. "auto" is lossless: greedy without sampling; with sampling the
        first rule of the drafter: for chains block where the drafts of a named drafter come with
        their distribution, match where drafter "auto" drafts chains, and token otherwise; for trees
        what docs/loop.md#trees lists first.""",
        default="auto",
        with_beams=("auto", "greedy"),
    )
    lenience: float | None = option(
        _number("in (0, 1]", lambda x: 0 < x <= 1),
        """how lenient rule "lenient" is, in (0, 1], which must then be given. The rule compares P
        with lenience times Q: 1 is rule token, and no token's probability exceeds the target's
        divided by it.""",
        with_beams=(None,),
    )
    typical_epsilon: float | None = option(
        _number("in [0, 1]", lambda x: 0 <= x <= 1),
        """largest bound of rule "typical", in [0, 1]. The rule accepts a draft whose probability
        exceeds min(epsilon, delta * exp(-H)), H the entropy of P. None is 0.09, Medusa's.""",
        with_beams=(None,),
    )
    typical_delta: float | None = option(
        _number("finite and at least 0", lambda x: 0 <= x < float("inf")),
        """factor of exp(-H) in the bound of rule "typical", at least 0. None is 0.3.""",
        with_beams=(None,),
    )
    top_beta_rank: int | None = option(
        _or_none(check_integer, 1, 2**31 - 1),
        """rank of rule "top_beta", at least 1, which must then be given. The rule accepts a draft
        if fewer than so many tokens are likelier.""",
        with_beams=(None,),
    )
    top_beta_distance: float | None = option(
        _number("at least 0", lambda x: x >= 0),
        """distance of rule "top_beta", at least 0. The rule accepts a draft if its logarithmic
        probability is at most so much below that of the likeliest token. None is no bound.""",
        with_beams=(None,),
    )
    ablate: str | None = option(
        _none_or_one_of(*ABLATIONS),
        """what verification leaves out, to show what it is for. None is nothing. "residual":
        recovered tokens are drawn from P and not from the residual, so that sampled text is biased
        towards the drafter's. It is for chains, whose rule is then "token"; see
        docs/loop.md#without-the-residual.""",
        with_beams=(None,),
    )
    tree: Any = option(
        _layout,
        """the trees to draft, None for chains. A `TreeSpec` or a tuple of branchings, such as
        (4, 2, 1), drafted by one or more draft models (prompt lookup fills as many nodes); an
        `EagleTree`, drafted by one draft model; a `TrieTree`, by any drafters; see
        docs/loop.md#trees. One forward of the target verifies the whole tree, which needs the cache
        "spec".""",
        with_beams=(None,),
    )
    seed: Any = option(
        _keep,  # the call knows how many seeds there may be
        """seed of sampling. None draws one seed for each sequence of a sampled call from torch's
        default generator (``torch.manual_seed``). An int is the seed of sequence 0, from which
        those of the others are derived. A list, array or tensor of ints gives them one by one.
        ``stats.seeds`` holds the seeds; with ``seed=stats.seeds`` the same call gives the same text
        again. See docs/loop.md#seeds.""",
    )
    guard: bool | BenefitGuard | None = option(
        _must_be("None, True, False or a BenefitGuard", NoneType, bool, BenefitGuard),
        """whether drafting waits or pauses where it does not pay; see
        docs/loop.md#the-benefit-guard. None: where the text cannot change by it (greedy, match,
        target_only). True: always, by the clock; where that changes the text, which then depends on
        timing, a note says so. False: never. A `BenefitGuard` has limits of your own.""",
    )
    compile: bool | None = option(
        _or_none(check_flag),
        """how forwards run. None: on a CPU on packed weights, where the model and the memory allow
        it; a note says where they do not. Packed weights are a second copy, which is kept as long
        as the model. False: by the model itself. True: on a CUDA device compiled and replayed as
        CUDA graphs, which `warm_up` makes before the first call; on a CPU as None. Where that is
        not possible, the model's own forwards run, with a warning that says why. See
        docs/forwards.md.""",
        with_beams=(None, False),
    )


@dataclass(frozen=True, kw_only=True)
class Options(CommonOptions):
    """All options of the loop, checked once; see `generate`."""

    gamma: int | None = option(_keep, "alias of ``num_assistant_tokens``.")
    num_speculative_tokens: int | None = option(_keep, "alias of ``num_assistant_tokens``.")
    num_assistant_beams: int | None = option(
        _or_none(check_integer),
        """with ``num_beams``, the beam width of the draft model, at least ``num_beams``. None is
        twice ``num_beams``. See docs/loop.md#beam-search.""",
    )
    cache: str = option(
        _must_be("a string", str),
        """how keys and values are kept: "spec" (one static cache), "aligned" (one of Transformers
        for the whole batch), "dynamic" (one for each sequence, one forward after the other), or
        "auto": the first of them that fits the model, with a note in the statistics where it is not
        "spec"; see docs/loop.md#caches.""",
        default="auto",
        with_beams=("auto", "spec"),
    )
    self_check: bool = option(
        check_flag,
        """whether the first use of a cache with a model class and configuration compares the model
        with itself through the cache on a few tokens; see `check_model`. False trusts the model:
        where a cache does not fit it, the text is wrong without an error.""",
        default=True,
    )
    streamer: Streamer | None = option(_check_streamer, "Hugging Face streamer; one sequence only.")
    trace: Trace | None = option(
        _must_be("None or a function", NoneType, Callable),
        "called after every round with a `TracedRound`.",
        with_beams=(None,),
    )
    clock: Callable[[], float] = option(
        _must_be("a function that gives seconds", Callable),
        "gives seconds; for tests.",
        default=time.perf_counter,
    )

    def __post_init__(self) -> None:
        check = COMMON["num_assistant_tokens"].metadata["check"]
        names = ("num_assistant_tokens", *ALIASES)
        numbers = [check(name, getattr(self, name)) for name in names]
        number = resolve_num_assistant_tokens(*numbers, tree=self.tree)
        given = {**vars(self), **dict.fromkeys(ALIASES), "num_assistant_tokens": number}
        for option in fields(Options):
            value = option.metadata["check"](option.name, given[option.name])
            object.__setattr__(self, option.name, value)
        rule_parameters(self)


ALIASES = ("gamma", "num_speculative_tokens")
COMMON = {option.name: option for option in fields(CommonOptions)}


def resolve_num_assistant_tokens(*values: int | None, tree: Any = None) -> int | None:
    """The value of the alias that is not None, or None.

    Raises:
        TypeError: a value that is not an integer.
        ValueError: two aliases disagree, the value is out of range, or a tree is given.
    """
    name = "num_assistant_tokens"
    given = {COMMON[name].metadata["check"](name, value) for value in values} - {None}
    if given and tree is not None:
        raise ValueError(
            f"{name} must not be given with tree, which says what is drafted, got {min(given)}"
        )
    if len(given) > 1:
        raise ValueError(
            f"{', '.join((name, *ALIASES[:-1]))} and {ALIASES[-1]} are the same argument, "
            f"got {sorted(given)}"
        )
    return given.pop() if given else None


def rule_name(rule: Any) -> str:
    """The name of the rule that a caller asks for."""
    return rule if isinstance(rule, str) else CUSTOM_RULE


def rule_parameters(options: CommonOptions) -> dict[str, Any]:
    """The arguments of the ops that belong to the rule, by name; empty for lossless rules.

    Raises:
        ValueError: one is missing, or belongs to another rule.
    """
    named = rule_name(options.rule)
    found = {}
    for rule, parameters in LOSSY_RULES.items():
        for name, default in parameters.items():
            value = getattr(options, name)
            if rule == named:
                found[name] = default if value is None else value
            elif value is not None:
                raise ValueError(
                    f"{name} is for rule {rule!r} alone, got {value} with rule {named!r}"
                )
    for name, value in found.items():
        if value is None:
            raise ValueError(f"rule {named!r} needs {name}, which has no default")
    return found


def with_texts(function: Function) -> Function:
    """Appends the texts of the options to the docstring of a function, for ``help``."""
    if function.__doc__:  # not with python -OO
        texts = [
            textwrap.fill(
                f"{option.name}: {option.metadata['text']}",
                100,
                initial_indent=" " * 4,
                subsequent_indent=" " * 8,
                break_on_hyphens=False,
            )
            for option in fields(Options)
        ]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__), "", "Options:", *texts])
    return function
