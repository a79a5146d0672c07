"""Options that the command line refuses before it loads torch or a model, with one line each."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

from specdec_hf.arguments import PARAMETERS, check_value, did_you_mean
from specdec_hf.cli import options
from specdec_hf.cli.options import (
    CHAIN_RULES,
    COPY_TREE_RULES,
    DEFAULT_DRAFTERS,
    LOSSY_TREE_RULES,
    ONLY_CHAIN_RULES,
    TREE_RULES,
    TRIE_RULES,
    check_choice,
)
from specdec_hf.cli.paths import check_is_folder, check_readable
from specdec_hf.cli.sources import Source, find_model
from specdec_hf.cli.terminal import fail
from specdec_hf.drafting.layer_numbers import check_layers_of
from specdec_hf.drafting.parsed import parse_drafter
from specdec_hf.drafting.registry import AUTO, drafters, entry_named, entry_of, value_of
from specdec_hf.model_paths import num_layers
from specdec_hf.options import (
    COMMON,
    DEFAULT_NUM_ASSISTANT_TOKENS,
    CommonOptions,
    resolve_num_assistant_tokens,
    rule_parameters,
)
from specdec_hf.rules import ABLATIONS, LOSSY_RULES
from specdec_hf.schedules.base import MAX_DRAFT_LENGTH, Schedule
from specdec_hf.schedules.registry import check_takes, make_schedule, tree_schedules
from specdec_hf.trees import TrieTree, as_layout

Command = TypeVar("Command", bound=Callable[..., None])

GUARDS = {"auto": None, "on": True, "off": False}  # the argument guard of `generate`
SCHEDULE = "--num-assistant-tokens-schedule"
OTHER_DRAFTERS = "a name that --drafter help lists, none, "
# Where the drafts of several drafters become one tree: chains of each copying drafter, and nodes.
TREE_CHAINS, TREE_NODES = 4, 15
NEUTRAL = {name: one.neutral for name, one in PARAMETERS.items() if name != "temperature"}


@dataclass(frozen=True, kw_only=True)
class Settings(CommonOptions):
    """The options of a command that uses a model, in the words of the command line.

    `check` refuses what is wrong, and returns complete ones.
    """

    model: options.ModelName = "embedded"
    dtype: options.Dtype = "auto"
    device: options.Device = None
    system: options.System = None
    chat_template: options.ChatTemplate = True
    max_new_tokens: options.MaxNewTokens = 128
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    drafter: Sequence[str] = ()  # none are DEFAULT_DRAFTERS
    cascade: options.Cascade = None
    num_assistant_tokens_schedule: str | None = None
    seed: int | None = None
    guard: str = "auto"  # type: ignore[assignment]  # a name of GUARDS

    @property
    def do_sample(self) -> bool:
        """Whether answers are sampled."""
        return bool(self.sampling["temperature"] > 0)


# Names of arguments; "a drafter" is a word, and --drafter is named already.
_NAMES = re.compile(rf"(?<!-)(?<!\ba )\b({'|'.join((*COMMON, *PARAMETERS))})\b")
# Whose words are others than in `generate`.
_OWN_WORDS = ("drafter", "tree", "guard", "ablate")
# The types of the options whose fields are of others.
_TYPES = {
    "drafter": options.Drafters,
    "tree": str | None,
    "temperature": options.Temperature,
    "top_k": options.TopK,
    "top_p": options.TopP,
    "min_p": options.MinP,
}


def takes_settings(*, without: Sequence[str] = (), **defaults: Any) -> Callable[[Command], Command]:
    """Give a command one option for each setting in the place of its parameter ``settings``.

    Args:
        without: settings that the command has no option for.
        defaults: those that are others than in `Settings`.
    """

    def decorate(command: Command) -> Command:
        own = [one for one in _settings(defaults) if one.name not in without]

        @functools.wraps(command)
        def wrapped(**arguments: Any) -> None:
            given = {one.name: arguments.pop(one.name) for one in own}
            sampling = {n: given.pop(n) for n in ("temperature", *NEUTRAL) if n in given}
            command(settings=Settings(**given, sampling=sampling), **arguments)

        parameters = {**inspect.signature(command, eval_str=True).parameters}
        place = list(parameters).index("settings")
        del parameters["settings"]
        others = [one.replace(kind=one.KEYWORD_ONLY) for one in parameters.values()]
        wrapped.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*others[:place], *own, *others[place:]]
        )
        return wrapped  # type: ignore[return-value]

    return decorate


def _settings(defaults: dict[str, Any]) -> list[inspect.Parameter]:
    """A parameter for each setting, those of the loop at the end."""
    values = {setting.name: setting.default for setting in fields(Settings)}
    del values["sampling"]
    values |= {"temperature": 0.0, **dict.fromkeys(NEUTRAL), **defaults}
    hints = {**get_type_hints(Settings, include_extras=True), **_TYPES}
    found = []
    for name in sorted(values, key=lambda name: name in COMMON):
        hint = hints[name]
        if get_origin(hint) is not Annotated:
            hint = Annotated[hint, options.own(name)]
        kind = inspect.Parameter.KEYWORD_ONLY
        found.append(inspect.Parameter(name, kind, default=values[name], annotation=hint))
    return found


@dataclass(frozen=True)
class Sources:
    """The models of a run.

    Attributes:
        model: the target.
        drafters: of each ``--drafter``; None where it is no model.
    """

    model: Source
    drafters: list[Source | None]


def check(settings: Settings) -> tuple[Settings, Sources]:
    """The complete settings and the models that they name, or a refusal; torch is not loaded."""
    sampling = _complete_sampling(settings.sampling)
    settings = replace(settings, drafter=settings.drafter or DEFAULT_DRAFTERS, sampling=sampling)
    if settings.seed is not None and not -(2**63) <= settings.seed < 2**63:
        fail(f"--seed must be in [-2**63, 2**63), got {settings.seed}")
    check_choice("--guard", settings.guard, tuple(GUARDS))
    if settings.system is not None:
        check_text("--system", settings.system)
        if not settings.chat_template:
            fail("--system needs a chat template, but --no-chat-template is given")
    _check_values(settings)
    settings = _complete_drafting(settings)
    _check_abilities(settings)
    if settings.ablate is not None:
        _check_ablation(settings.ablate, settings)
    drafters = [_find_drafter(name) for name in settings.drafter]
    _check_rule(settings, drafters)
    return settings, Sources(find_model("--model", settings.model), drafters)


def _check_values(settings: Settings) -> None:
    """Refuse what the loop itself would refuse, in its words."""
    for name in filter(lambda name: name not in _OWN_WORDS, COMMON):
        with _refusing():
            COMMON[name].metadata["check"](name, getattr(settings, name))


@contextmanager
def _refusing(option: str = "") -> Iterator[None]:
    """Errors of the loop end the command with one line, in which options have their own names.

    An ``option`` is named first where the line does not begin with it.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        line = _NAMES.sub(lambda name: f"--{name[0].replace('_', '-')}", str(error))
        fail(f"{option}: {line}" if option and not line.startswith(option) else line)


def _complete_sampling(given: dict[str, Any]) -> dict[str, Any]:
    check_sampling_value("temperature", given["temperature"])
    for name, value in given.items():
        if name != "temperature" and value is not None and not given["temperature"] > 0:
            option = f"--{name.replace('_', '-')}"
            fail(f"{option} needs --temperature above 0: greedy decoding does not sample")
    sampling = {**given, **{n: v for n, v in NEUTRAL.items() if given.get(n) is None}}
    if not 0 <= sampling["top_k"] < 2**31:
        fail(f"--top-k must be in [0, 2**31), got {sampling['top_k']}")
    for name in ("top_p", "min_p"):
        check_sampling_value(name, sampling[name])
    return sampling


def check_sampling_value(name: str, value: float) -> None:
    """Refuse a value that a sampling parameter cannot have."""
    with _refusing():
        check_value(name, value)


def _complete_drafting(settings: Settings) -> Settings:
    cascade = parse_cascade(settings)
    drafts, several = settings.num_assistant_tokens, len(settings.drafter) > 1 and not cascade
    schedule = settings.num_assistant_tokens_schedule
    settings = replace(settings, tree=parse_branching(settings.tree))
    if several and "none" in settings.drafter:
        fail(f"--drafter none must be the only one, got {', '.join(settings.drafter)}")
    if drafts == 0:
        fail("--num-assistant-tokens must be at least 1, got 0; --drafter none drafts nothing")
    own_tree = has_own_tree(settings.drafter)
    for option, given in (
        ("--num-assistant-tokens", drafts is not None),
        (SCHEDULE, schedule not in (None, "constant")),
        ("--tree", settings.tree is not None),
        ("--guard", settings.guard != "auto"),
        ("--ablate", settings.ablate is not None),
    ):
        if given and "none" in settings.drafter:
            fail(f"{option} needs a drafter, but --drafter is none")
        chains_serve = option == "--num-assistant-tokens" and _is_auto(settings)
        if given and option == "--tree" and _is_auto(settings):
            fail("--tree needs --drafter prompt_lookup or a draft model, such as layers:4")
        its_own = option in ("--num-assistant-tokens", "--tree")
        if given and own_tree and its_own and not chains_serve:
            fail(
                f"{option} must not be given with --drafter {settings.drafter[0]}, which drafts "
                "its own"
            )
    with _refusing():
        resolve_num_assistant_tokens(drafts, tree=settings.tree)
    trees = several or settings.tree is not None or (own_tree and not _is_auto(settings))
    if schedule is not None:
        made = check_schedule(schedule)
        with _refusing():
            check_takes("", made, trees=trees, has_stats=True)  # without them `_check_abilities`
    if several:
        if settings.tree is not None:
            fail("--tree must not be given with several --drafter, whose drafts become one tree")
        depth = drafts or DEFAULT_NUM_ASSISTANT_TOKENS
        tree = TrieTree(TREE_CHAINS, depth, max(TREE_NODES, depth))
        return replace(settings, tree=tree, num_assistant_tokens=None)
    if settings.tree is None and drafts is None and (not own_tree or chains_of_auto(settings)):
        return replace(settings, num_assistant_tokens=DEFAULT_NUM_ASSISTANT_TOKENS)
    return settings


def parse_cascade(settings: Settings) -> tuple[str, tuple[int, ...]] | None:
    """The kind in ``--cascade``, and how many tokens each drafter of a horizontal one drafts."""
    if settings.cascade is None:
        return None
    kind, colon, text = settings.cascade.partition(":")
    drafters = list(settings.drafter)
    check_choice("--cascade", kind, ("vertical", "horizontal"))
    if len(drafters) < 2:
        fail(f"--cascade needs several --drafter, the largest first, got {', '.join(drafters)}")
    for n, name in enumerate(drafters):
        entry = entry_named(name)
        leads = entry is not None and entry.leads_cascade and kind == "vertical" and n == 0
        if leads and settings.tree is not None:
            fail(f"--tree must not be given with --drafter {name}, which drafts chains")
        makes = entry is not None and (entry.own_tree or (entry.makes_forward and not leads))
        if name == "none" or makes:
            fail(f"--cascade needs drafters of chains of their own, got --drafter {name}")
    if kind == "vertical":
        if colon:
            fail(f"--cascade vertical takes no numbers, got {settings.cascade!r}")
        for name in drafters[:-1]:
            entry = entry_named(name)
            if entry is not None and not (entry.is_model or entry.leads_cascade):
                fail(
                    "--cascade vertical needs draft models, such as layers:4, before the last "
                    f"--drafter, got {name}"
                )
        return kind, ()
    numbers = text.split(",")
    if not all(number.isdecimal() and 0 < int(number) <= MAX_DRAFT_LENGTH for number in numbers):
        fail(f"--cascade must be horizontal:N,N with tokens to draft, got {settings.cascade!r}")
    if len(numbers) != len(drafters) - 1:
        fail(
            f"--cascade horizontal needs a number for each --drafter but the last, which are "
            f"{len(drafters) - 1}, got {text!r}"
        )
    if settings.tree is not None:
        fail("--tree must not be given with --cascade horizontal, which drafts chains")
    return kind, tuple(map(int, numbers))


def _check_abilities(settings: Settings) -> None:
    """Refuse drafters with a name that lack what the schedule or the tree needs."""
    if settings.cascade == "vertical":  # the model's drafts have what is needed
        return
    schedule = make_schedule(settings.num_assistant_tokens_schedule or "constant")
    for name in settings.drafter:
        entry = entry_named(name)
        if entry is None or entry.own_tree:
            continue
        with _refusing():
            check_takes(f"--drafter {name}", schedule, trees=False, has_stats=entry.has_stats)
        if isinstance(settings.tree, tuple) and not (entry.several or entry.is_model):
            fail(
                "--tree needs a draft model or a drafter that drafts several chains, got "
                f"--drafter {name}"
            )


def check_ablated_part(ablate: str, settings: Settings) -> None:
    """Refuse a part that verification does not have, or that greedy decoding never runs."""
    check_choice("--ablate", ablate, ABLATIONS)
    if not settings.do_sample:
        fail(f"--ablate {ablate} needs --temperature above 0: greedy decoding does not sample")


def _check_ablation(ablate: str, settings: Settings) -> None:
    check_ablated_part(ablate, settings)
    option = f"--ablate {ablate}"
    if settings.rule not in ("auto", "token"):
        fail(f"--rule must be auto or token with {option}, got {settings.rule!r}")
    if settings.tree is not None or (has_own_tree(settings.drafter) and not _is_auto(settings)):
        drafters = " --drafter ".join(settings.drafter)
        fail(f"{option} is for chains, got trees of --drafter {drafters}")


def _check_rule(settings: Settings, drafters: list[Source | None]) -> None:
    named = [entry for entry in map(entry_named, settings.drafter) if entry is not None]
    if settings.cascade == "vertical":  # a tree is drawn by the first, a model
        named = []
    rules: tuple[str, ...]
    lossy = tuple(LOSSY_RULES)
    if _is_auto(settings):
        option = chains_of_auto(settings)
        only_trees = () if option else COPY_TREE_RULES
        rules = tuple(dict.fromkeys((*CHAIN_RULES, *only_trees)))
        which = f" with {option}, which trees do not take" if option else ""
    elif settings.tree is None and not any(entry.own_tree for entry in named):
        rules, which = CHAIN_RULES, ""
    elif any(not entry.draws for entry in named):
        rules, lossy = COPY_TREE_RULES, LOSSY_TREE_RULES
        which = f" with trees of --drafter {' --drafter '.join(settings.drafter)}"
    elif isinstance(settings.tree, TrieTree):
        rules, lossy, which = TRIE_RULES, LOSSY_TREE_RULES, " with several --drafter"
    else:
        rules, lossy, which = TREE_RULES, LOSSY_TREE_RULES, " with --tree"
    check_choice("--rule", settings.rule, ("auto", *rules, *lossy), which)
    with _refusing():
        rule_parameters(settings)
    if settings.rule == "greedy" and settings.do_sample:
        fail(
            "--rule greedy needs --temperature 0: it would not keep the distribution of sampled "
            f"text, got --temperature {settings.sampling['temperature']}"
        )


def _is_auto(settings: Settings) -> bool:
    """Whether the loop chooses the drafter, by the other options too."""
    return list(settings.drafter) == [AUTO]


def chains_of_auto(settings: Settings) -> str | None:
    """The option with which drafter "auto" drafts chains; None where it may draft trees."""
    schedule = (settings.num_assistant_tokens_schedule or "constant").partition(":")[0]
    given = {
        f"{SCHEDULE} {schedule}": schedule not in tree_schedules(),
        f"--rule {settings.rule}": settings.rule in ONLY_CHAIN_RULES,
        f"--ablate {settings.ablate}": settings.ablate is not None,
        "--num-assistant-tokens": settings.num_assistant_tokens is not None,
    }
    return next((option for option, is_given in given.items() if is_given), None)


def check_schedule(schedule: str) -> Schedule:
    """The schedule of that name, or a refusal where it cannot be made."""
    with _refusing(SCHEDULE):
        return make_schedule(schedule)


def _find_drafter(name: str) -> Source | None:
    """The model that one ``--drafter`` names; None for other drafters, which are checked."""
    if name == "none":
        return None
    _refuse_merged(name)
    try:
        entry = entry_of(name)
    except ValueError as error:
        fail(f"--{error}")
    try:
        parts = parse_drafter(name)
    except ValueError as error:
        fail(f"--drafter {name}: {error}")
    if entry is None:
        hint = did_you_mean(name, [*drafters(), "none", "embedded"])
        return find_model("--drafter", parts.value, other=OTHER_DRAFTERS, hint=hint)
    if parts.reads_file:
        check_readable("--drafter", Path(parts.path))
        try:
            parts.check_file()
        except ValueError as error:
            fail(f"--drafter {name}: {error}")
    if parts.reads_folder:
        check_is_folder(f"--drafter {name.partition(':')[0]}", Path(parts.path))
    return None


def _refuse_merged(name: str) -> None:
    """Refuse ``a+b``, which commands that compare drafters take and have split before."""
    parts = name.split("+")
    if len(parts) < 2 or not all(part == "embedded" or entry_named(part) for part in parts):
        return
    if Path(value_of(name)).exists():  # a path with a + in it
        return
    several = " ".join(f"--drafter {part}" for part in parts)
    fail(f"--drafter must name one drafter, got {name!r}; several are given as {several}")


def check_fit_by_files(name: str, source: Source) -> None:
    """Raise ValueError for a drafter that does not fit its model, as far as small files tell."""
    parts, total = parse_drafter(name), num_layers(source.path)
    config = Path(parts.path) / "config.json"
    if parts.reads_folder and not config.is_file():
        raise ValueError(f"cannot read a head's {config}: No such file or directory")
    if total is not None:
        check_layers_of(name, total)


def refuse_drafter(name: str, message: str) -> None:
    """End the command, whose drafter ``name`` does not fit its model."""
    fail(f"--drafter {name}: {message}")


def parse_branching(tree: str | None) -> tuple[int, ...] | None:
    """The numbers of children in ``--tree``."""
    if tree is None:
        return None
    widths = tree.split(",")
    if not all(width.isdecimal() and len(width) < 5 for width in widths):
        fail(f"--tree must be numbers of children such as 4,2,1, got {tree!r}")
    branching = tuple(map(int, widths))
    with _refusing():
        as_layout(branching)
    return branching


def check_text(option: str, text: str) -> None:
    """Refuse text that is blank or that cannot be encoded, such as bytes that are no UTF-8."""
    if not text.strip():
        fail(f"{option} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        fail(f"{option} is not valid UTF-8 at character {error.start}")


def has_own_tree(drafters: Sequence[str]) -> bool:
    """Whether the only one of these drafters drafts trees of its own."""
    entry = entry_named(drafters[0]) if len(drafters) == 1 else None
    return entry is not None and entry.own_tree
