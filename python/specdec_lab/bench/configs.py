"""The configs of the command ``bench``: drafters with their schedules, and batches of prompts."""

# ruff: noqa: PLC0415  # torch loads at first use; see cli/app.py
from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from specdec_hf.cli.checks import Settings, chains_of_auto, has_own_tree
from specdec_hf.cli.prompts import Question
from specdec_hf.cli.run import encode, make_decoder
from specdec_hf.cli.sources import Source
from specdec_hf.cli.speeds import GENERATE
from specdec_hf.cli.terminal import fail
from specdec_hf.drafting.registry import AUTO, drafters, entry_named
from specdec_hf.options import rule_parameters
from specdec_hf.rules import LOSSY_RULES
from specdec_hf.schedules.registry import tree_schedules

if TYPE_CHECKING:
    from specdec_hf.cli.load import Loaded

    from specdec_lab.bench.runs import Config, PromptBatch

MERGED = "+"


def settings_of(
    common: Settings, drafters: Sequence[str], schedules: Sequence[str], number: int | None
) -> list[Settings]:
    """The options of each drafter with each schedule, to be checked as those of ``generate`` are.

    Args:
        common: the options of all.
        drafters: ``a+b`` merges two.
        schedules: trees that take none of them are measured with constant; without any, each
            drafter is measured with its default.
        number: of assistant tokens, which trees of a drafter's own do without.
    """
    chosen = []
    for name in dict.fromkeys(drafters):
        parts = merged(name)
        own_tree = has_own_tree(parts)
        trees_of_auto = parts == [AUTO] and chains_of_auto(common) is None
        # As the loop chooses for drafter "auto".
        default = "optimal" if trees_of_auto and common.rule not in LOSSY_RULES else "constant"
        for schedule in _schedules(parts, list(dict.fromkeys(schedules)) or [default]):
            chosen.append(
                replace(
                    common,
                    drafter=parts,
                    num_assistant_tokens=None if own_tree else number,
                    num_assistant_tokens_schedule=schedule,
                )
            )
    return chosen


def merged(name: str) -> list[str]:
    """The drafters that ``a+b`` merges; a + in the path of a file or folder belongs to the path."""
    pieces, parts = name.split(MERGED), []
    while pieces:
        joined = (pieces[:size] for size in range(len(pieces), 1, -1))
        paths = (MERGED.join(some) for some in joined if not drafters().keys() >= set(some))
        parts.append(next(filter(_names_a_path, paths), pieces[0]))
        del pieces[: parts[-1].count(MERGED) + 1]
    if not all(parts):
        fail(f"--drafter must be a name, or names with {MERGED} between them, got {name!r}")
    return parts


def _names_a_path(drafter: str) -> bool:
    value = drafter.partition(":")[2] if entry_named(drafter) else drafter
    return os.path.exists(os.path.expanduser(value))


def _schedules(parts: list[str], schedules: Sequence[str]) -> list[str]:
    """Those that a drafter takes; constant for trees that take none of them."""
    if len(parts) == 1 and not has_own_tree(parts):
        return list(schedules)
    trees = tree_schedules()
    return [one for one in schedules if one.partition(":")[0] in trees] or ["constant"]


def make_configs(
    chosen: Sequence[Settings],
    loaded: Loaded,
    peers: Sequence[str],
    source: Source,
    *,
    named: bool,
) -> tuple[list[Config], dict[str, str]]:
    """Those that are compared with, the peers and the drafters; and why a peer is left out.

    Args:
        chosen: the settings of each drafter.
        loaded: the models.
        peers: names.
        source: where the target came from.
        named: whether the user named the drafters. Those that an encoder-decoder refuses, such as
            trees, are left out where he did not.
    """
    from specdec_hf.decoder import SpeculativeDecoder
    from specdec_hf.runner.protocol import is_encoder_decoder

    from specdec_lab.bench.peer_process import LeftOutError
    from specdec_lab.bench.peers import make_peers
    from specdec_lab.bench.runs import WITHOUT, Config

    configs, left_out = [Config(GENERATE)], {}
    for name in peers:
        try:
            configs += make_peers(name, loaded, source)
        except LeftOutError as error:
            left_out[name] = str(error)
    compiled = chosen[0].compile
    last = [] if compiled is None else ["compiled" if compiled else "own forwards"]
    configs.append(
        Config(
            ", ".join([WITHOUT, *last]),
            SpeculativeDecoder(None, compile=compiled),
            without_drafts=True,
            # In 16 bits Transformers rounds otherwise, and drafts change no text of this library.
            reference=loaded.dtype != "float32",
        )
    )
    left = list(loaded.drafters)
    for settings in chosen:
        mine = [left.pop(0) for _ in settings.drafter]
        if settings.drafter == ["none"]:  # it is the one above
            continue
        decoder = make_decoder(settings, mine if len(mine) > 1 else mine[0], loaded.tokenizer)
        schedule = settings.num_assistant_tokens_schedule or "constant"
        words = [MERGED.join(settings.drafter), *["tree"] * (settings.tree is not None)]
        if schedule != "constant":
            words.append(schedule)
        if settings.rule in LOSSY_RULES:
            parameters = ", ".join(f"{x:g}" for x in rule_parameters(settings).values())
            words.append(f"lossy rule {settings.rule} {parameters}")
        elif settings.rule != "auto":
            words.append(f"rule {settings.rule}")
        if settings.ablate is not None:
            words.append(f"lossy without the {settings.ablate}")
        if settings.guard != "auto":
            words.append(f"guard {settings.guard}")
        configs.append(
            Config(
                ", ".join([*words, *last]),
                decoder,
                schedule=schedule,
                peer=not named and is_encoder_decoder(loaded.model),
                drafts_on_host=all(
                    drafts_on_host(name, drafter, loaded.model)
                    for name, drafter in zip(settings.drafter, mine, strict=True)
                ),
            )
        )
    return configs, left_out


def drafts_on_host(name: str, drafter: Any, model: Any) -> bool:
    """Whether a drafter of this name computes nothing of a model when it drafts for one."""
    from specdec_hf.heads.auto import AutoDrafter

    if name == AUTO:
        try:
            return not AutoDrafter().has_head(model)
        except ValueError:  # calls draft without it
            return True
    entry = entry_named(name)
    if entry is None:
        return name == "none"
    return not (entry.is_model or entry.makes_forward or entry.place.startswith("heads."))


def first_of_each_category(prompts: list[Question], limit: int | None) -> list[Question]:
    """At most ``limit`` prompts of each category, in their order."""
    seen: defaultdict[str, int] = defaultdict(int)
    chosen = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if limit is None or seen[prompt.category] <= limit:
            chosen.append(prompt)
    return chosen


def in_batches(loaded: Loaded, prompts: list[Question], size: int) -> list[PromptBatch]:
    """Batches of ``size`` prompts, those of several sequences with categories in turns.

    The prompts that do not fill a last batch are left out.
    """
    from specdec_lab.bench.runs import PromptBatch

    if size > 1:
        prompts = categories_in_turns(prompts)
    batches = []
    for first in range(0, len(prompts) - size + 1, size):
        some = prompts[first : first + size]
        names = [prompt.name for prompt in some]
        category = some[0].category if size == 1 else ""
        batches.append(PromptBatch(names, category, _padded(loaded, some)))
    return batches


def categories_in_turns(prompts: list[Question]) -> list[Question]:
    """The first prompt of each category, then the second, and so on."""
    seen: defaultdict[str, int] = defaultdict(int)
    place = {}
    for prompt in prompts:
        seen[prompt.category] += 1
        place[id(prompt)] = seen[prompt.category]
    return sorted(prompts, key=lambda prompt: place[id(prompt)])


def _padded(loaded: Loaded, prompts: list[Question]) -> dict[str, Any]:
    from specdec_hf.runner.protocol import is_encoder_decoder
    from torch.nn.utils.rnn import pad_sequence

    side: Literal["left", "right"] = "right" if is_encoder_decoder(loaded.model) else "left"
    encoded = [
        encode(
            loaded.tokenizer, [{"role": "user", "content": prompt.turns[0]}], loaded.model.device
        )
        for prompt in prompts
    ]
    return {
        name: pad_sequence([one[name][0] for one in encoded], batch_first=True, padding_side=side)
        for name in encoded[0]
    }
