"""The command ``analyze``: the paper's tables and figures, measured with the user's models."""

# ruff: noqa: PLC0415  # torch and matplotlib load at first use; see cli/app.py
from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from specdec_hf.cli import interrupt, options
from specdec_hf.cli.checks import (
    NEUTRAL,
    Settings,
    Sources,
    check,
    check_ablated_part,
    check_schedule,
    takes_settings,
)
from specdec_hf.cli.options import option
from specdec_hf.cli.paths import check_folder, check_json
from specdec_hf.cli.prompts import SHIPPED_PROMPTS, Question, read_prompts
from specdec_hf.cli.report import collect_info, write_json
from specdec_hf.cli.run import (
    begin_chat,
    check_prompts,
    encode,
    load_models,
    progress,
    progress_bar,
)
from specdec_hf.cli.terminal import FAILED, fail
from specdec_hf.drafting.registry import entry_named
from specdec_hf.options import COMMON
from specdec_hf.requirements import install_command
from specdec_hf.schedules.base import MAX_DRAFT_LENGTH
from specdec_hf.schedules.registry import SCHEDULES

from specdec_lab.analysis.printing import print_report
from specdec_lab.analysis.tables import printed_tables, tables_of
from specdec_lab.bench.configs import merged

if TYPE_CHECKING:
    from specdec_hf.cli.load import Loaded
    from specdec_hf.drafting.drafter import Drafter

    from specdec_lab.analysis.measure import DrafterAnalysis, Measurement
    from specdec_lab.analysis.replay import Text
    from specdec_lab.analysis.tables import ByTemperature
    from specdec_lab.analysis.tree_pictures import Picture

DRAWS = 10_000  # of the ablation's experiment
WARM_UP_TOKENS = 4

Tree = Annotated[
    str | None,
    option(
        "--tree N,N,..",
        "Also draw the trees that each drafter of chains drafts for the first prompt: "
        "children at each depth, such as 4,2,1. Drafters of trees of their own are measured, and "
        "drawn without it.",
    ),
]


@takes_settings(without=("chat_template", "cascade", *COMMON), max_new_tokens=48, temperature=1.0)
def analyze_command(
    *,
    prompts: options.PromptFile = None,
    settings: Settings,
    drafter: Annotated[
        list[str],
        options.drafter_option(
            "A name that --drafter help lists, or a model, named as for --model; a+b merges two. "
            "Several are measured one after the other."
        ),
    ] = ["prompt_lookup"],  # noqa: B006  # typer copies it
    gammas: Annotated[
        str, option("--num-assistant-tokens --gamma N,N,..", "Tokens to draft per round.")
    ] = "3,7",
    schedule: Annotated[
        list[str],
        option(
            "--num-assistant-tokens-schedule NAME",
            "Compare a schedule with an oracle for the number of drafts: "
            f"{', '.join(SCHEDULES)}; it begins with the first N. May be repeated.",
            lambda name, value: check_schedule(value),
        ),
    ] = [],  # noqa: B006  # typer copies it
    tree: Tree = None,
    seed: Annotated[
        int, option("--seed N", "Seed of the first prompt; those of the others count up.")
    ] = 0,
    limit: options.Limit = 4,
    ablate: Annotated[
        str | None,
        option(
            "--ablate residual",
            "Show what the text would be like if recovered tokens came from P, not the residual.",
        ),
    ] = None,
    output: Annotated[
        Path | None, option("--output FOLDER", "Write figures and the page of tokens here.")
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Measure acceptance rates and speed-ups, and compare them with the formulas.

    The tables and figures are those of Leviathan et al. 2023. Each drafter is measured by itself,
    at temperature 0 and at --temperature, on the first turn of each prompt.
    """
    settings = replace(settings, drafter=drafter, seed=seed, tree=tree)
    check_json(json_file, prompts)
    if ablate is not None:
        check_ablated_part(ablate, settings)
    numbers = parse_gammas(gammas)
    settings, failed = _left_out(settings)
    settings, checked = _check_drafters(settings, max(numbers))
    _check_figures(output)
    chosen = read_prompts(prompts or SHIPPED_PROMPTS)[:limit]
    task = "shipped" if prompts is None else "stdin" if prompts == "-" else Path(prompts).stem
    analysis = Analysis(chosen, task, settings, checked, numbers, schedule, bool(ablate), failed)
    analyze(analysis, output, json_file)


def parse_gammas(text: str) -> list[int]:
    """The numbers in ``--num-assistant-tokens``, in their order."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part.strip()) < 5 for part in parts):
        fail(f"--num-assistant-tokens must be numbers such as 3,7, got {text!r}")
    numbers = list(dict.fromkeys(map(int, parts)))
    for number in numbers:
        if not 1 <= number <= MAX_DRAFT_LENGTH:
            fail(f"--num-assistant-tokens must be in [1, {MAX_DRAFT_LENGTH}], got {number}")
    return numbers


def _left_out(settings: Settings) -> tuple[Settings, dict[str, str]]:
    """The settings with the other drafters, and why these cannot be analyzed, by name."""
    failed = {}
    for name in dict.fromkeys(settings.drafter):
        if name == "none":
            fail("--drafter must not be none: without drafts there is nothing to analyze")
        if any(one is not None and one.makes_forward for one in map(entry_named, merged(name))):
            instead = "bench gives the share of its drafts that are accepted"
            if name.startswith("early_exit"):
                instead = "layers:N has the distribution of early_exit:N"
            failed[name] = f"cannot be analyzed: it runs the target within its rounds; {instead}"
    left = [name for name in dict.fromkeys(settings.drafter) if name not in failed]
    if not left:
        fail(_message(failed))
    return replace(settings, drafter=left), failed


def _check_drafters(
    settings: Settings, gamma: int
) -> tuple[Settings, list[tuple[Settings, Sources]]]:
    """Check each drafter as the only one; their sampling parameters and tree complete those of all.

    Args:
        settings: of the command.
        gamma: the depth of trees that merge drafters.
    """
    checked = []
    for name in settings.drafter:
        parts = merged(name)
        if len(parts) > 1 and settings.tree is not None:
            fail(f"--tree must not be given with --drafter {name}, whose drafts become one tree")
        depth = gamma if len(parts) > 1 else None
        checked.append(check(replace(settings, drafter=parts, num_assistant_tokens=depth)))
    alone, _ = checked[-1]
    tree = settings.tree if settings.tree is None else alone.tree
    return replace(settings, sampling=alone.sampling, tree=tree), checked


def _check_figures(output: Path | None) -> None:
    if output is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        fail(f"--output needs matplotlib: {install_command('plot', 'matplotlib')}")
    check_folder("--output", output)


@dataclass
class Analysis:
    """What the command is to do.

    Attributes:
        prompts: questions.
        task: their name.
        settings: options of all.
        checked: those of each drafter, whose tree merges several, and the models that they name.
        gammas, schedules, ablate: as in the command.
        failed: messages of drafters that cannot be analyzed, by name; those that fail are added.
    """

    prompts: Sequence[Question]
    task: str
    settings: Settings
    checked: Sequence[tuple[Settings, Sources]]
    gammas: Sequence[int]
    schedules: Sequence[str]
    ablate: bool
    failed: dict[str, str]

    def load(self, say: Callable[[str], None]) -> Loaded:
        """The models of all drafters; those that do not fit the target are added to ``failed``."""

        def refuse(part: str, message: str) -> None:
            for name in self.settings.drafter:
                if part in merged(name):
                    self.failed[name] = message
            if self.failed.keys() >= set(self.settings.drafter):
                fail(_message(self.failed))

        def check_fit(tokenizer: Any, config: Any) -> None:
            check_prompts(self.prompts, self.settings, tokenizer, config)

        names = [name for settings, _ in self.checked for name in settings.drafter]
        model = self.checked[0][1].model
        sources = Sources(model, [one for _, each in self.checked for one in each.drafters])
        alone = replace(self.settings, drafter=names)
        return load_models(alone, sources, say, check_fit, refuse)

    def resolve(self, loaded: Loaded) -> dict[str, Drafter]:
        """The drafters by name, without those that cannot be analyzed with this model."""
        from specdec_hf.drafters.resolve import resolve_drafter
        from specdec_hf.drafting.drafter import rules_of

        from specdec_lab.analysis.replay import rule_for

        drafters, left = {}, list(loaded.drafters)
        for name, (settings, _) in zip(self.settings.drafter, self.checked, strict=True):
            parts = [left.pop(0) for _ in settings.drafter]
            if name in self.failed:
                continue
            try:
                several = len(parts) > 1  # of whose chains the layout makes one tree
                one = resolve_drafter(
                    parts if several else parts[0], settings.tree if several else None, loaded.model
                )
                assert one is not None
                one.check_config(loaded.model.config)
                one.check_tokenizer(loaded.tokenizer)
            except (OSError, TypeError, ValueError) as error:
                self.failed[name] = str(error)
                continue
            if rule_for(one) in rules_of(one):
                drafters[name] = one
            else:
                self.failed[name] = (
                    f"cannot be analyzed: rule {rule_for(one)} cannot verify its drafts, only "
                    f"{', '.join(rules_of(one))} can"
                )
        return drafters

    def measurement(
        self, loaded: Loaded, temperature: float, *, warm_up: bool = False
    ) -> Measurement:
        """How to measure at one temperature, or a short answer that warms up."""
        from specdec_lab.analysis.measure import Measurement

        settings = self.settings
        prompts = self.prompts[:1] if warm_up else self.prompts
        chats = [
            [*begin_chat(settings), {"role": "user", "content": prompt.turns[0]}]
            for prompt in prompts
        ]
        inputs = [encode(loaded.tokenizer, chat, loaded.model.device) for chat in chats]
        sampling = settings.sampling if temperature else {**NEUTRAL, "temperature": 0.0}
        return Measurement(
            loaded.model, loaded.tokenizer, inputs, sampling,
            WARM_UP_TOKENS if warm_up else settings.max_new_tokens,
            self.gammas[:1] if warm_up else self.gammas, settings.seed or 0,
            draws=DRAWS if self.ablate and temperature > 0 and not warm_up else 0,
            schedules=() if warm_up else self.schedules,
        )  # fmt: skip


def analyze(analysis: Analysis, output: Path | None, json_file: Path | None) -> None:
    """Load the models, measure, print the tables, and write figures, page and report."""
    settings, failed = analysis.settings, analysis.failed
    with progress_bar() as say:
        loaded = analysis.load(say)
        drafters = analysis.resolve(loaded)
        say("warming up")
        _measure(analysis.measurement(loaded, 0.0, warm_up=True), drafters, failed)
    if failed.keys() >= drafters.keys():
        _tell(failed)
    found: dict[float, list[DrafterAnalysis]] = {}
    plain: list[Text] = []
    temperatures = sorted({0.0, settings.sampling["temperature"]})
    with progress() as bar:
        compared = 1 + len(analysis.schedules) if analysis.schedules else 0
        stages = 1 + len(drafters) * (1 + len(analysis.gammas) + compared)
        total = len(analysis.prompts) * settings.max_new_tokens * stages
        for temperature in temperatures:
            task = bar.add_task(f"temperature {temperature:g}", total=total)
            measurement = analysis.measurement(loaded, temperature)
            measurement.advance = functools.partial(bar.advance, task)
            plain, found[temperature] = _measure(measurement, drafters, failed)
            bar.update(task, completed=total)

    last = found[temperatures[-1]]
    tables = tables_of(found, loaded.title, analysis.task)
    print_report(loaded, found, tables)
    if output is not None and last:
        from specdec_lab.analysis.figures import write_pictures

        every = [*tables, *printed_tables()]
        write_pictures(output, loaded, analysis.prompts, settings, last, plain, every)
    pictures = _draw_trees(analysis, loaded, drafters, last)
    if output is not None and pictures:
        from specdec_lab.analysis.tree_pictures import write_trees

        write_trees(output, loaded, settings, pictures)
    write_json(json_file, _report(analysis, loaded, found, pictures))
    if failed:
        _tell(failed)


def _draw_trees(
    analysis: Analysis,
    loaded: Loaded,
    drafters: Mapping[str, Drafter],
    measured: Sequence[DrafterAnalysis],
) -> list[Picture]:
    """Print the trees of the first prompt, and return them.

    Drafters of trees are drawn as they were measured. Where ``--tree`` is given, drafters of chains
    answer once more and draft trees of its shape, which are drawn and not measured.
    """
    from specdec_lab.analysis.tree_pictures import Picture, draft_trees, print_trees

    prompt, settings = analysis.prompts[0], analysis.settings
    pictures = [
        Picture(one.name, prompt.turns[0], one.first_trees) for one in measured if one.trees
    ]
    if settings.tree is not None:
        chains = {one.name: drafters[one.name] for one in measured if not one.trees}
        pictures += draft_trees(loaded, prompt, settings, chains, analysis.failed)
    print_trees(pictures)
    return pictures


def _report(
    analysis: Analysis, loaded: Loaded, found: ByTemperature, pictures: Sequence[Picture]
) -> dict[str, Any]:
    """All that was measured and drawn, as plain values for JSON."""
    from specdec_kernels.analysis import LENIENCE_SPEEDS, TABLE_1, lenience_speeds, table_1

    printed: dict[str, Iterable[tuple[Any, Any]]] = {
        "table_1": zip(TABLE_1, table_1(), strict=True),
        "lenience_speeds": zip(LENIENCE_SPEEDS, lenience_speeds(), strict=True),
    }
    return {
        "info": collect_info(),
        **asdict(analysis.settings),
        "num_assistant_tokens": list(analysis.gammas),
        "num_assistant_tokens_schedule": list(analysis.schedules),
        "device": str(loaded.model.device),
        **{
            name: [{"printed": one._asdict(), "computed": two._asdict()} for one, two in rows]
            for name, rows in printed.items()
        },
        "measured": [
            {**one.to_dict(), "temperature": temperature}
            for temperature, analyses in found.items()
            for one in analyses
        ],
        "trees": [picture.to_dict() for picture in pictures],
        "failed": analysis.failed,
    }


def _measure(
    measurement: Measurement, drafters: Mapping[str, Drafter], failed: dict[str, str]
) -> tuple[list[Text], list[DrafterAnalysis]]:
    """The target's own answers, and what is measured on them of each drafter by name.

    A drafter that fails is left out from then on, and its message goes to ``failed``.
    """
    texts, found = measurement.write_texts(), []
    for name, drafter in drafters.items():
        if name in failed:
            continue
        try:
            found.append(measurement.analyze(name, drafter, texts))
        except Exception as error:  # what is measured of the others is still shown and written
            if interrupt.InterruptState.seen:
                raise
            failed[name] = str(error) or type(error).__name__
    return texts, found


def _message(failed: Mapping[str, str]) -> str:
    return "; ".join(f"--drafter {name}: {message}" for name, message in failed.items())


def _tell(failed: Mapping[str, str]) -> NoReturn:
    fail(_message(failed), FAILED)
