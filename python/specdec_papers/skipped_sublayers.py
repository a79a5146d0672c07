"""The attention and MLP sublayers that a self-drafting model leaves out: a value and its file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specdec_hf.arguments import check_integers, shown

from specdec_papers.split_model import Skipped

FORMAT, VERSION = "specdec layer_skip", 1
# Fields of a config that say whether a file was made for a model.
SIZES = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")


@dataclass(frozen=True)
class SkippedSublayers:
    """Sublayers that drafts leave out; `LayerSkipDrafter` drafts without them.

    Attributes:
        attention, mlp: numbers of the layers whose attention or MLP is left out, counted from 0,
            ascending, each at least 1: drafts share at least the first layer with the target.
        model: of the target that they were found for, the fields `SIZES` of its config; empty where
            that is not known.
        search: how they were found, for whoever reads the file.

    Raises:
        TypeError: layers that are no integers.
        ValueError: a layer below 1, one that is listed twice, or no sublayer at all.

    >>> SkippedSublayers(attention=[2, 3], mlp=[3]).pairs() == {
    ...     (2, "attention"), (3, "attention"), (3, "mlp")}
    True
    """

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    model: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    search: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for name in ("attention", "mlp"):
            layers = check_integers(name, getattr(self, name), 1)
            if len(set(layers)) < len(layers):
                raise ValueError(f"{name} must list each layer once, got {shown(list(layers))}")
            object.__setattr__(self, name, tuple(sorted(layers)))
        if not self.attention and not self.mlp:
            raise ValueError("attention and mlp must list at least one layer, got none")

    @property
    def first(self) -> int:
        """The first layer of which something is left out."""
        return min((*self.attention, *self.mlp))

    @property
    def last(self) -> int:
        """The last layer of which something is left out."""
        return max((*self.attention, *self.mlp))

    def pairs(self) -> Skipped:
        """The sublayers as `SplitModel` takes them."""
        listed = {"attention": self.attention, "mlp": self.mlp}
        return frozenset((layer, name) for name, layers in listed.items() for layer in layers)

    def check_config(self, config: Any) -> None:
        """Raise ValueError for a model that lacks these layers, or that they were not found for."""
        target = sizes_of(config)
        for name, value in self.model.items():
            if target[name] != value:
                raise ValueError(
                    f"the skipped layers must be those of a model like the target: they were found "
                    f"for {name} = {value}, and the target has {target[name]}"
                )
        total = target["num_hidden_layers"]
        if self.last >= total:
            raise ValueError(
                f"skipped layers must be below the target's {total} with drafter layer_skip, got "
                f"{self.last}"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, for ``layer_skip:FILE``; one that was there is replaced as a whole."""
        content = {
            "format": FORMAT, "version": VERSION, "attention": self.attention, "mlp": self.mlp,
            "model": dict(self.model), "search": dict(self.search),
        }  # fmt: skip
        staging = Path(f"{os.fspath(path)}.new")
        staging.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        staging.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SkippedSublayers:
        """Read a file of `save`.

        Raises:
            OSError: a file that cannot be read.
            ValueError: no such file, by name of what is wrong.
        """
        name = os.fspath(path)
        try:
            content = json.loads(Path(path).read_bytes())
        except ValueError as error:  # no JSON, or no UTF-8
            raise ValueError(f"{name} is no file of skipped layers: {error}") from None
        given = content.get("format") if isinstance(content, dict) else None
        if given != FORMAT:
            raise ValueError(f"{name} is no file of skipped layers: format must be {FORMAT!r}")
        if content.get("version") != VERSION:
            raise ValueError(f"version of {name} must be {VERSION}, got {content.get('version')!r}")
        model, search = content.get("model", {}), content.get("search", {})
        if not isinstance(model, dict) or not model.keys() <= set(SIZES):
            raise ValueError(f"model of {name} must hold {', '.join(SIZES)}, got {shown(model)}")
        if not isinstance(search, dict):
            raise ValueError(f"search of {name} must be an object, got {shown(search)}")
        try:
            return cls(content.get("attention", ()), content.get("mlp", ()), model, search)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None


def sizes_of(config: Any) -> dict[str, Any]:
    """The fields `SIZES` of a model's config, None where it has none."""
    text = config.get_text_config(decoder=True)
    return {name: getattr(text, name, None) for name in SIZES}
