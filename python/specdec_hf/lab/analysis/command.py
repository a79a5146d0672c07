"""The command ``analyze``: the paper's tables and figures, measured with the user's models."""

# ruff: noqa: PLC0415  # torch and matplotlib load at first use; see cli/app.py
from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from specdec_hf.cli import interrupt, options
from specdec_hf.cli.checks import (
    NEUTRAL,
    Settings,
    Sources,
    check,
    check_limit,
    has_own_tree,
    makes_forward,
)
from specdec_hf.cli.paths import check_folder, check_json
from specdec_hf.cli.prompts import SHIPPED_PROMPTS, Prompt, read_prompts
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
from specdec_hf.lab.analysis.tables import print_report, to_dict
from specdec_hf.requirements import install_command
from specdec_hf.schedules.base import LONGEST_DRAFT

if TYPE_CHECKING:
    from specdec_hf.cli.load import Loaded
    from specdec_hf.drafting.drafter import Drafter
    from specdec_hf.lab.analysis.measure import DrafterAnalysis, Measurement
    from specdec_hf.lab.analysis.replay import Text

DRAWS = 10_000  # of the ablation's experiment
ABLATIONS = ("residual",)

Drafters = Annotated[
    list[str],
    options.drafter_option(
        "A name that --drafter help lists, or a model, named as for --model. Several are measured "
        "one after the other."
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", metavar="N", help="Seed of the first prompt; those of the others count up."
    ),
]
Gammas = Annotated[
    str,
    typer.Option(
        "--num-assistant-tokens", "--gamma", metavar="N,N,..", help="Tokens to draft per round."
    ),
]
Tree = Annotated[
    str | None,
    typer.Option(
        "--tree",
        metavar="N,N,..",
        help="Also draw the trees that each drafter drafts for the first prompt: children at each "
        "depth, such as 4,2,1. Drafters of trees of their own are drawn without it, and not "
        "measured.",
    ),
]
Ablate = Annotated[
    str | None,
    typer.Option(
        "--ablate",
        metavar="residual",
        help="Show what the text would be like if recovered tokens came from P, not the residual.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", metavar="FOLDER", help="Write figures and the page of tokens here."),
]


def analyze_command(
    prompts: options.PromptFile = None,
    system: options.System = None,
    model: options.ModelName = "embedded",
    drafter: Drafters = ["prompt_lookup"],  # noqa: B006  # typer copies it
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    gammas: Gammas = "3,7",
    tree: Tree = None,
    max_new_tokens: options.MaxNewTokens = 48,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: Seed = 0,
    limit: options.Limit = 4,
    ablate: Ablate = None,
    output: Output = None,
    json_file: options.JsonFile = None,
) -> None:
    """Measure acceptance rates and speed-ups, and compare them with the formulas.

    The tables and figures are those of Leviathan et al. 2023. Each drafter is measured by itself,
    at temperature 0 and at --temperature, on the first turn of each prompt.
    """
    settings = Settings(
        model=model, drafter=drafter, dtype=dtype, device=device, system=system,
        max_new_tokens=max_new_tokens, seed=seed, tree=tree,
        sampling={"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p},
    )  # fmt: skip
    check_limit(limit)
    check_json(json_file, prompts)
    _check_ablation(ablate, settings)
    numbers = parse_gammas(gammas)
    sources = _check_drafters(settings)
    _check_figures(output)
    chosen = read_prompts(prompts or SHIPPED_PROMPTS)[:limit]
    analyze(chosen, settings, sources, numbers, bool(ablate), output, json_file)


def parse_gammas(text: str) -> list[int]:
    """The numbers in ``--num-assistant-tokens``, in their order."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part.strip()) < 5 for part in parts):
        fail(f"--num-assistant-tokens must be numbers such as 3,7, got {text!r}")
    numbers = list(dict.fromkeys(map(int, parts)))
    for number in numbers:
        if not 1 <= number <= LONGEST_DRAFT:
            fail(f"--num-assistant-tokens must be in [1, {LONGEST_DRAFT}], got {number}")
    return numbers


def _check_ablation(ablate: str | None, settings: Settings) -> None:
    if ablate is None:
        return
    if ablate not in ABLATIONS:
        fail(f"--ablate must be one of {', '.join(ABLATIONS)}, got {ablate!r}")
    if not settings.do_sample:
        fail("--ablate residual needs --temperature above 0: greedy decoding does not sample")


def _check_drafters(settings: Settings) -> Sources:
    """Check each drafter as the only one; completes the sampling parameters."""
    found = []
    for name in settings.drafter:
        if name == "none":
            fail("--drafter must not be none: without drafts there is nothing to analyze")
        if makes_forward(name):
            fail(
                f"--drafter {name} cannot be analyzed: it runs the target within its rounds"
                + (
                    "; layers:N has the distribution of early_exit:N"
                    * name.startswith("early_exit")
                )
            )
        alone = replace(settings, drafter=[name], sampling=dict(settings.sampling))
        found.append(check(alone))
    settings.sampling, settings.tree = alone.sampling, alone.tree
    return Sources(found[0].model, [sources.drafters[0] for sources in found])


def _check_figures(output: Path | None) -> None:
    if output is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        fail(f"--output needs matplotlib: {install_command('plot', 'matplotlib')}")
    check_folder("--output", output)


def analyze(
    prompts: Sequence[Prompt],
    settings: Settings,
    sources: Sources,
    gammas: Sequence[int],
    ablate: bool,
    output: Path | None,
    json_file: Path | None,
) -> None:
    """Load the models, measure, print the tables, and write figures, page and report."""
    with progress_bar() as say:
        loaded = load_models(
            settings, sources, say, functools.partial(_check_model, prompts, settings)
        )
        drafters = _resolved(settings.drafter, loaded)
        say("warming up")
        failed: dict[str, str] = {}
        if drafters:
            few = _measurement(loaded, prompts[:1], settings, gammas[:1], 0.0, 4)
            _measure(few, drafters, failed)
    if len(failed) == len(settings.drafter):
        _tell(failed)
    found: dict[float, list[DrafterAnalysis]] = {}
    plain = []
    temperatures = sorted({0.0, settings.sampling["temperature"]}) if drafters else []
    with progress() as bar:
        stages = 1 + len(drafters) * (1 + len(gammas))
        total = len(prompts) * settings.max_new_tokens * stages
        for temperature in temperatures:
            task = bar.add_task(f"temperature {temperature:g}", total=total)
            measurement = _measurement(
                loaded, prompts, settings, gammas, temperature, settings.max_new_tokens
            )
            measurement.advance = functools.partial(bar.advance, task)
            measurement.draws = DRAWS if ablate and temperature > 0 else 0
            texts, found[temperature] = _measure(measurement, drafters, failed)
            plain = [text.stats for text in texts]
            bar.update(task, completed=total)

    last = found[temperatures[-1]] if found else []
    if found:
        print_report(loaded, found)
    if output is not None and last:
        from specdec_hf.lab.analysis.figures import write_pictures

        write_pictures(output, loaded, prompts, settings, last, plain)
    drawn = {
        name: one
        for name, one in zip(settings.drafter, loaded.drafters, strict=True)
        if name not in failed and (settings.tree is not None or has_own_tree(name))
    }
    pictures = []
    if drawn:
        from specdec_hf.lab.analysis.tree_pictures import draft_trees, print_trees, write_trees

        pictures = draft_trees(loaded, prompts[0], settings, drawn, failed)
        print_trees(pictures)
        if output is not None and pictures:
            write_trees(output, loaded, settings, pictures)
    content = {
        "info": collect_info(),
        **asdict(settings),
        "num_assistant_tokens": list(gammas),
        "device": str(loaded.model.device),
        **to_dict(found),
        "trees": [picture.to_dict() for picture in pictures],
        "failed": failed,
    }
    write_json(json_file, content)
    if failed:
        _tell(failed)


def _check_model(
    prompts: Sequence[Prompt], settings: Settings, tokenizer: Any, config: Any
) -> None:
    if config.is_encoder_decoder:
        fail(f"--model must be a causal language model, got the type {config.model_type!r}")
    check_prompts(prompts, settings, tokenizer, config)


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
            if interrupt.State.seen:
                raise
            failed[name] = str(error) or type(error).__name__
    return texts, found


def _tell(failed: Mapping[str, str]) -> NoReturn:
    fail("; ".join(f"--drafter {name}: {message}" for name, message in failed.items()), FAILED)


def _resolved(names: Sequence[str], loaded: Loaded) -> dict[str, Drafter]:
    """The drafters of chains by name; those of trees of their own are left out."""
    from specdec_hf.drafters.resolve import resolve_drafter
    from specdec_hf.drafting.drafter import rules_of
    from specdec_hf.lab.analysis.replay import REPLAY_RULE

    given = loaded.drafter if isinstance(loaded.drafter, list) else [loaded.drafter]
    drafters = {}
    for name, one in zip(names, given, strict=True):
        if has_own_tree(name):
            continue
        drafter = resolve_drafter(one, None, loaded.model)
        assert drafter is not None
        if REPLAY_RULE not in rules_of(drafter):
            fail(
                f"--drafter {name} cannot be analyzed: rule {REPLAY_RULE} cannot verify its "
                f"drafts, only {', '.join(rules_of(drafter))} can"
            )
        drafters[name] = drafter
    return drafters


def _measurement(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    settings: Settings,
    gammas: Sequence[int],
    temperature: float,
    max_new_tokens: int,
) -> Measurement:
    from specdec_hf.lab.analysis.measure import Measurement

    chats = [
        [*begin_chat(settings), {"role": "user", "content": prompt.turns[0]}] for prompt in prompts
    ]
    inputs = [encode(loaded.tokenizer, chat, loaded.model.device) for chat in chats]
    sampling = settings.sampling if temperature else {**NEUTRAL, "temperature": 0.0}
    return Measurement(
        loaded.model, loaded.tokenizer, inputs, sampling, max_new_tokens, gammas, settings.seed or 0
    )
