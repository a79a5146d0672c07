"""The profile of a model: the drafts that pay on one's own prompts and machine, in a JSON file.

``python -m specdec_hf tune`` writes it, and `Options` takes from it what a caller leaves open. This
module does without torch until a call is checked, because the command line reads a profile before
it loads torch.
"""

# ruff: noqa: PLC0415  # torch loads at first use
from __future__ import annotations

import functools
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specdec_hf.arguments import did_you_mean, shown
from specdec_hf.drafting.registry import (
    AUTO,
    entry_named,
    entry_of,
    make_drafter,
    parse_drafter,
    sampling_of,
)
from specdec_hf.schedules.registry import check_takes, make_schedule
from specdec_hf.trees import EagleTree, TreeSpec, TrieTree, as_layout

FORMAT, VERSION = "specdec profile", 1
SECTIONS = ("format", "version", "options", "model", "conditions", "versions", "measured")
# The keys of a section with the types of their values.
MODEL: dict[str, Any] = {"name": str, "class": str, "sizes": dict, "digest": str | None}
# Fields of a config that say whether a file was made for a model.
SIZES = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
CONDITIONS: dict[str, Any] = {
    "device": str, "processor": str, "instructions": str, "threads": int, "dtype": str,
    "batch_size": int, "sampled": bool,
}  # fmt: skip
VERSIONS: dict[str, Any] = dict.fromkeys(("specdec-kernels", "torch", "transformers"), str)
_KINDS = {
    str: "a text", int: "an integer of at least 1", bool: "true or false", dict: "an object",
    str | None: "null or a text", str | int | None: "null, a text or an integer",
}  # fmt: skip
# How much is drafted. It was measured with the drafter of the profile, and suits no other.
OF_THE_DRAFTER = ("num_assistant_tokens", "num_assistant_tokens_schedule", "tree")
# What plain decoding leaves unread.
OF_DRAFTING = ("num_assistant_tokens", "num_assistant_tokens_schedule", "guard", "ablate")
LAYOUTS = {kind.__name__: kind for kind in (TreeSpec, EagleTree, TrieTree)}
DIGITS = 12  # hexadecimal digits of a digest in a message


@dataclass(frozen=True)
class Profile:
    """What `tune` has found for one model.

    Attributes:
        options: of `generate` by their names, "drafter" among them. Draft models have the names of
            the command line.
        model: ``name`` for readers, ``class``, ``sizes`` (fields of its config) and ``digest`` of
            its weights, None where it was not known.
        conditions: what it was measured with, by the names `CONDITIONS`.
        versions: of the packages `VERSIONS`.
        measured: how it was found, for readers.
        path: of the file, for messages.
        taken: names of the options that a call took from here.
        unread: names of the options that the call gives without effect, because the plain decoding
            that it took from here drafts nothing.
    """

    options: dict[str, Any]
    model: dict[str, Any]
    conditions: dict[str, Any]
    versions: dict[str, str]
    measured: dict[str, Any]
    path: str = ""
    taken: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def complete(self, options: Any, given: Mapping[str, Any]) -> None:
        """Give the options of a call what it leaves open; their ``profile`` then says what that is.

        Args:
            options: those of the loop, or those of the command line.
            given: as in `beside`.
        """
        values = self.beside(given)
        for name, value in values.items():
            setattr(options, name, value)
        plain = "drafter" in values and values["drafter"] is None
        unread = tuple(name for name in OF_DRAFTING if plain and name in given)
        options.profile = replace(self, taken=tuple(values), unread=unread)

    def beside(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options that a call takes which gives these itself.

        Where it gives a drafter, lengths, trees and schedules of the profile are left out, unless
        that is the model which the profile drafts with. A number of tokens and a tree exclude each
        other, so either of them keeps out both. A tree also keeps out the schedule, since trees do
        not take each of them.

        Args:
            given: options by their names. A drafter is as in `generate`, or a list of names.
        """
        left_out = {*given}
        if "drafter" in given and not self._drafts_with(given["drafter"]):
            left_out |= {*OF_THE_DRAFTER}
        if "tree" in given:
            left_out.add("num_assistant_tokens_schedule")
        if left_out & {"num_assistant_tokens", "tree"}:
            left_out |= {"num_assistant_tokens", "tree"}
        return {name: value for name, value in self.options.items() if name not in left_out}

    def _drafts_with(self, drafter: Any) -> bool:
        """Whether a drafter is, or may be, the model that this profile drafts with."""
        drafters = _listed(drafter)
        if not self.draft_models or all(isinstance(one, str) for one in drafters):
            own = map(_absolute, _listed(self.options["drafter"]))
            return bool(self.draft_models) and [*map(_absolute, drafters)] == [*own]
        return True  # a model that is loaded

    def explain(self, message: str) -> str:
        """An error message about the options of a call, which names this file where it is at fault.

        A message that begins with an option that the call took from here is one about this file. In
        others the end says which of the options come from here.
        """
        if not self.taken:
            return message
        names = "|".join(name.replace("_", "[-_]") for name in self.taken)
        option = re.compile(rf"(?<![\w-])(?:--)?({names})(?:s?(?![\w-]))")
        found = dict.fromkeys(name.replace("-", "_") for name in option.findall(message))
        drafters = _listed(self.options["drafter"]) if "drafter" in self.taken else []
        paths = [one.path for one in map(parse_drafter, drafters) if one.reads]
        if any(re.search(rf"(?<![\w./-]){re.escape(path)}(?![\w-])", message) for path in paths):
            found["drafter"] = None
        if not found:
            return message
        if option.match(message):
            return f"profile {self.path}: options: {message.removeprefix('--')}"
        return f"{message}; {' and '.join(found)} came from profile {self.path}"

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Errors about options, and files that drafters read, name this file, as in `explain`."""
        try:
            yield
        except (TypeError, ValueError, OSError) as error:
            message, kind = self.explain(str(error)), type(error)
            if kind.__module__ != "builtins" or message == str(error):
                raise  # others may not be made of a message
            if isinstance(error, UnicodeError):
                kind = ValueError
            made = kind(message)
            if isinstance(made, OSError) and isinstance(error, OSError):
                made.errno = error.errno
            raise made from error

    @property
    def draft_models(self) -> list[str]:
        """The models among its drafters, by their names on the command line."""
        return [name for name in _listed(self.options["drafter"]) if entry_named(name) is None]

    def check_call(self, model: Any, batch_size: int, *, sampled: bool) -> list[str]:
        """Notes on a call whose conditions are others than those of the measurement.

        Args:
            model: the target.
            batch_size: number of sequences B.
            sampled: whether the call samples.

        Raises:
            ValueError: the profile is that of another model.
        """
        notes, ours = [], describe_model(model, "")
        if self.unread:
            notes.append(
                f"profile {self.path} found no drafts that pay, so {' and '.join(self.unread)} "
                "has no effect without a drafter of the call"
            )
        for name, value in self.model["sizes"].items():
            if ours["sizes"].get(name) != value:
                raise ValueError(
                    f"profile {self.path} must be that of the model, got one of "
                    f"{self.model['name']}, whose {name} is {shown(value)}; this model's is "
                    f"{shown(ours['sizes'].get(name))}"
                )
        here = describe_conditions(model, batch_size, sampled=sampled)
        # A copy in float16 has another digest than one in float32 or bfloat16.
        half = [dtype for dtype in (self.conditions["dtype"], here["dtype"]) if dtype == "float16"]
        digests = [one["digest"] for one in (self.model, ours)]
        if None in digests or len(half) == 1:
            notes.append(f"whether profile {self.path} is that of these weights was not checked")
        elif digests[0] != digests[1]:
            made_for, found = (digest[:DIGITS] for digest in digests)
            raise ValueError(
                f"profile {self.path} must be that of the model, got one of {self.model['name']}, "
                f"whose weights have digest {made_for}; this model's have {found}"
            )
        others = {
            name: (value, now)
            for then, current in ((self.conditions, here), (self.versions, describe_versions()))
            for name, value in then.items()
            if (now := current[name]) != value
        }
        if others:
            differing = "; ".join(
                f"{name} was {_said(then)} and is {_said(now)}"
                for name, (then, now) in others.items()
            )
            notes.append(
                f"profile {self.path} was measured under other conditions, so other drafts may "
                f"pay here: {differing}"
            )
        return notes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file; one that was there is replaced as a whole."""
        content = {"format": FORMAT, "version": VERSION}
        content |= {name: getattr(self, name) for name in SECTIONS if name not in content}
        text = json.dumps(content, indent=1, default=lambda x: {type(x).__name__: asdict(x)})
        staging = Path(f"{os.fspath(path)}.new")
        staging.write_text(text + "\n", encoding="utf-8")
        staging.replace(path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], checks: Mapping[str, Callable[[str, Any], Any]]
    ) -> Profile:
        """Read a file of `save`.

        Args:
            path: of the file.
            checks: of the options that a profile may hold, by name; as in `Options`.

        Raises:
            OSError: a file that cannot be read.
            ValueError: no such file, by the key that is wrong.
        """
        if not os.fspath(path):
            raise ValueError("profile must be the path of a file, got ''")
        where = f"profile {os.fspath(path)}"
        try:
            content = json.loads(Path(path).read_bytes())
        except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
            raise ValueError(f"{where} must be a JSON file that tune wrote: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{where} must be a file that tune wrote, with format {FORMAT!r}")
        if content.get("version") != VERSION:
            raise ValueError(
                f"{where}: version must be {VERSION}, got {shown(content.get('version'))}"
            )
        _check_keys(where, content, SECTIONS, SECTIONS)
        for name, kinds in (("model", MODEL), ("conditions", CONDITIONS), ("versions", VERSIONS)):
            _check_values(f"{where}: {name}", content[name], kinds)
        sizes = dict.fromkeys(SIZES, str | int | None)  # None where a config lacks the field
        _check_values(f"{where}: model: sizes", content["model"]["sizes"], sizes)
        _check_keys(f"{where}: options", content["options"], checks, ("drafter",))
        if not isinstance(content["measured"], dict):
            raise ValueError(f"{where}: measured must be an object")
        try:
            options = _read_options(content["options"], checks)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: options: {error}") from None
        return cls(
            options, content["model"], content["conditions"], content["versions"],
            content["measured"], os.fspath(path),
        )  # fmt: skip


def describe_model(model: Any, name: str) -> dict[str, Any]:
    """The section "model" of a profile.

    Args:
        model: the target.
        name: for readers.
    """
    from specdec_hf.heads.shipped import digest_of

    kind, sizes = type(model).__name__, sizes_of(model.config)
    return {"name": name, "class": kind, "sizes": sizes, "digest": digest_of(model)}


def sizes_of(config: Any) -> dict[str, Any]:
    """The fields `SIZES` of a model's config, None where it has none."""
    text = config.get_text_config(decoder=True)
    return {name: getattr(text, name, None) for name in SIZES}


def describe_conditions(model: Any, batch_size: int, *, sampled: bool) -> dict[str, Any]:
    """The section "conditions" of a profile; the arguments are those of `Profile.check_call`."""
    import torch

    import specdec_kernels

    on_gpu = model.device.type == "cuda"
    return {
        "device": model.device.type,
        "processor": torch.cuda.get_device_name(model.device) if on_gpu else _processor(),
        "instructions": specdec_kernels.cpu_capability(),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "batch_size": batch_size,
        "sampled": sampled,
    }


def describe_versions() -> dict[str, str]:
    """The section "versions" of a profile."""
    import torch
    import transformers

    import specdec_kernels

    found = (specdec_kernels.__version__, torch.__version__, transformers.__version__)
    return dict(zip(VERSIONS, map(str, found), strict=True))


@functools.cache
def _processor() -> str:
    """The model of the host's processor; its architecture where the host does not name it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _listed(drafter: Any) -> list[Any]:
    if drafter is None:
        return []
    return [*drafter] if isinstance(drafter, list | tuple) else [drafter]


def _absolute(drafter: str) -> str:
    """Two names of a folder are the same here, whatever follows them."""
    return os.path.abspath(os.path.expanduser(drafter))


def _check_keys(where: str, content: Any, known: Iterable[str], needed: Iterable[str]) -> None:
    """Raises ValueError for what is no object, and for a key that is unknown or missing."""
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be an object, got {shown(content)}")
    names = tuple(known)
    for key in content:
        if key not in names:
            raise ValueError(
                f"{where} must hold {', '.join(names)} alone, got {key!r}{did_you_mean(key, names)}"
            )
    for key in needed:
        if key not in content:
            raise ValueError(f"{where} must hold {key}, which is missing")


def _check_values(where: str, content: Any, kinds: Mapping[str, Any]) -> None:
    """Raises ValueError for other keys than these, and for a value of another type."""
    _check_keys(where, content, kinds, kinds)
    for key, kind in kinds.items():
        value = content[key]
        fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        if not fits or (kind is int and value < 1):
            raise ValueError(f"{where}: {key} must be {_KINDS[kind]}, got {shown(value)}")


def _read_options(
    given: dict[str, Any], checks: Mapping[str, Callable[[str, Any], Any]]
) -> dict[str, Any]:
    """The options, checked; numbers of children remain a tuple, as a caller would give them.

    Raises:
        TypeError, ValueError: an option that `generate` would refuse, by name.
    """
    options = {**given, "drafter": _read_drafter(given["drafter"])}
    if "tree" in options:
        options["tree"] = _tree_from_json(options["tree"])
    for name, value in options.items():
        if name != "drafter":  # whose check loads torch
            checks[name](name, value)
    drafter, number = options["drafter"], options.get("num_assistant_tokens")
    # "auto" drafts chains where it is asked to.
    entry = entry_named(drafter) if isinstance(drafter, str) and drafter != AUTO else None
    trees = f"drafter {drafter!r}" if entry is not None and entry.own_tree else ""
    if options.get("tree") is not None:
        trees = "tree"
    schedule = options.get("num_assistant_tokens_schedule")
    if schedule is not None:
        made = make_schedule(schedule)
        if trees:
            check_takes(str(drafter), made, trees=True, has_stats=False)
        elif entry is not None:
            stats = entry.has_stats or number == 0
            check_takes(drafter, made, trees=False, has_stats=stats)
    if trees and number is not None:
        raise ValueError(
            f"num_assistant_tokens must be null with {trees}, which says what is drafted, got "
            f"{number}"
        )
    return options


def _read_drafter(drafter: Any) -> Any:
    names = _listed(drafter)
    if drafter == [] or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"drafter must be null, a name or a list of names, got {shown(drafter)}")
    for name in names:
        if name in ("none", "help"):  # words of the command line
            raise ValueError(f"drafter must be null for plain decoding or a name, got {name!r}")
        try:
            _check_text(name)
        except (TypeError, ValueError) as error:
            about = "" if str(error).startswith("drafter") else f"drafter {name}: "
            raise ValueError(f"{about}{error}") from None
    return drafter


def _check_text(name: str) -> None:
    """Make a drafter that reads no file, which checks what follows its name; this loads torch.

    A file may be missing where the call gives another drafter, so calls that need it read it.
    """
    entry, parts = entry_of(name), parse_drafter(name)
    if entry is None:  # a model
        sampling_of(parts.options)
    elif ":" in name and not parts.reads:
        make_drafter(name)


def _tree_from_json(tree: Any) -> Any:
    if tree is None:
        return None
    if isinstance(tree, list):
        as_layout(tree)
        return tuple(tree)
    if not isinstance(tree, dict) or len(tree) != 1 or not tree.keys() <= LAYOUTS.keys():
        raise ValueError(
            "tree must be null, numbers of children or an object with one of "
            f"{', '.join(LAYOUTS)}, got {shown(tree)}"
        )
    ((name, fields),) = tree.items()
    if not isinstance(fields, dict):
        raise ValueError(f"tree: {name} must be an object, got {shown(fields)}")
    try:
        return LAYOUTS[name](**fields)
    except TypeError as error:  # an unknown field, or one of a wrong type
        raise ValueError(f"tree: {name}: {error}") from None
