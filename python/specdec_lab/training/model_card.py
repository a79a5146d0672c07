"""What a training run tells: report.json, the model card and the picture of its curves."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from specdec_hf.heads.base import Head
from specdec_hf.runner.protocol import num_parameters

from specdec_lab.training.kinds import KINDS
from specdec_lab.training.pipeline import MEASURED, TEXTS, Pipeline
from specdec_lab.training.texts import is_held_out, read_conversations
from specdec_lab.training.train import FIRST_LOSS

REPORT, CARD, PICTURE = "report.json", "README.md", "training.svg"


def collect_report(
    pipeline: Pipeline,
    head: Head,
    *,
    target: str,
    licence: str,
    command: str,
    data: str,
    resumed: Path | None = None,
) -> dict[str, Any]:
    """The content of report.json.

    Args:
        pipeline: after `Pipeline.run`.
        head: that it returned.
        target: name of the target.
        licence: of the target, which the head's follows.
        command: that ran.
        data: where the texts come from.
        resumed: folder of the head whose weights were the first ones.
    """
    texts = read_conversations(pipeline.data / TEXTS)
    curves = pipeline.curves
    return {
        "target": target,
        "licence": licence,
        "command": command,
        "data": data,
        "resumed": None if resumed is None else resumed.resolve().name,
        "draft_vocab_size": head.config.draft_vocab_size,
        "settings": asdict(pipeline.settings),
        "texts": len(texts),
        "tokens": sum(len(one.tokens) for one in texts),
        "held_out_texts": sum(map(is_held_out, texts)),
        "measured_texts": min(MEASURED, sum(map(is_held_out, texts))),
        "steps": curves.steps[-1],
        "seconds": {name: round(value, 1) for name, value in pipeline.seconds.items()},
        "loss": curves.losses[-1],
        "loss_name": curves.loss_names[-1],
        "greedy_acceptance": curves.greedy[-1],
        "sampled_acceptance": curves.shared[-1],
        "covered": curves.covered[-1] if curves.covered else None,
        "curves": asdict(curves),
        "parameters": num_parameters(head),
        "bytes": (pipeline.folder / KINDS[pipeline.settings.head].weights).stat().st_size,
        "dtype": str(pipeline.model.dtype).removeprefix("torch."),
        "device": str(pipeline.model.device),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def write_report(folder: Path, report: dict[str, Any], *, picture: bool) -> None:
    """Write report.json, the model card, and the picture where matplotlib is there."""
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n")
    (folder / CARD).write_text(model_card(report, picture=picture), encoding="utf-8")
    if picture:
        from specdec_lab.pictures import write_figure  # noqa: PLC0415  # needs matplotlib

        write_figure(_draw(report["curves"]), folder / PICTURE)


def model_card(report: dict[str, Any], *, picture: bool) -> str:
    """The text of README.md."""
    name = report["settings"]["head"]
    title = f"{KINDS[name].title} for {report['target']}"
    lines = [
        "---",
        f"license: {report['licence'].split()[0].lower()}",
        f"tags: [speculative-decoding, {name}]",
        "---",
        "",
        f"# {title}",
        "",
        *_about(report),
        "",
        "## Training",
        "",
        *_training(report),
        "",
        "## Acceptance",
        "",
        *_acceptance(report),
        "",
        *(["![Loss and acceptance](training.svg)", ""] if picture else []),
        "## Licence",
        "",
        f"That of the target: {report['licence']}.",
        "",
    ]
    return "\n".join(lines)


def _about(report: dict[str, Any]) -> list[str]:
    """What it is, and the call that drafts with it."""
    settings, kind = report["settings"], KINDS[report["settings"]["head"]]
    if kind.is_model:
        what = (
            f"{settings['num_layers']} layers of width {settings['width']} as in Llama, with the "
            "target's tokenizer; embeddings and output matrix are one"
        )
        drafter = "AutoModelForCausalLM.from_pretrained(FOLDER)"
    else:
        what = (
            f"in the published layout where there is one. They draft "
            f"{report['draft_vocab_size']:,} tokens of the vocabulary, whose output matrix is that "
            "of the target"
        )
        drafter = f'"{settings["head"]}:FOLDER"'
    return [
        f"{report['parameters']:,} parameters for speculative decoding of {report['target']} "
        f"({kind.source}), {what}.",
        "",
        "```python",
        f"generate(model, **inputs, drafter={drafter})",
        "```",
    ]


def _training(report: dict[str, Any]) -> list[str]:
    """The points of a list about texts, steps, loss and time."""
    settings, depth = report["settings"], len(report["greedy_acceptance"])
    times = ", ".join(f"{name} {value / 60:.1f} min" for name, value in report["seconds"].items())
    loss = settings["loss"]
    if loss != FIRST_LOSS:
        loss = f"{FIRST_LOSS} for the first half of the steps, then {loss}"
    points = [
        f"Data: {report['texts']:,} texts of {report['tokens']:,} tokens: {report['data']}.",
        f"Steps: {report['steps']:,} of {settings['batch_size']} texts, "
        f"{depth} draft step{'s' * (depth > 1)}, labels are the target's probabilities.",
        f"First weights: those of {report['resumed']}." if report["resumed"] else "",
        f"Loss: {loss}, learning rate {settings['learning_rate']:g}.",
        f"The model itself writes the answers of {settings['on_policy']:.0%} of the steps."
        if settings["on_policy"]
        else "",
        f"Time: {times}, on {report['threads']} threads of {report['machine']} "
        f"({report['device']}, {report['dtype']}).",
        f"Command: `{report['command']}`",
    ]
    return [f"- {point}" for point in points if point]


def _acceptance(report: dict[str, Any]) -> list[str]:
    """What was measured on texts that were held out."""
    shares = zip(report["greedy_acceptance"], report["sampled_acceptance"], strict=True)
    lines = [
        f"Measured on {report['measured_texts']} of {report['held_out_texts']} texts that took no "
        "part in training, for each draft step after accepted ones: how often the greedy draft is "
        "the target's choice, and the acceptance probability of a drawn draft at temperature 1.",
        "",
        "| draft step | greedy | temperature 1 |",
        "|---|---|---|",
        *(f"| {k} | {greedy:.3f} | {drawn:.3f} |" for k, (greedy, drawn) in enumerate(shares, 1)),
    ]
    if report["covered"] is not None:
        lines += [
            "",
            "It was trained at the places that the draft models before it miss. At "
            f"{report['covered']:.3f} of the places one of them or this one drafts the target's "
            "choice.",
        ]
    return lines


def _draw(curves: dict[str, Any]) -> Any:
    """Loss, and held-out acceptance, of each draft step over the steps of training."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # only for those who want the picture

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(curves["loss_names"]))
    for k, losses in enumerate(zip(*curves["losses"], strict=True), start=1):
        color = None
        for name, style in zip(names, ("-", "--", ":"), strict=False):
            shown = [n for n, one in enumerate(curves["loss_names"]) if one == name]
            steps, values = ([row[n] for n in shown] for row in (curves["loss_steps"], losses))
            (line,) = left.plot(steps, values, style, color=color, label=f"step {k}, {name}")
            color = line.get_color()
    for k, greedy in enumerate(zip(*curves["greedy"], strict=True), start=1):
        (line,) = right.plot(curves["steps"], greedy, label=f"step {k}, greedy")
        drawn = [shares[k - 1] for shares in curves["shared"]]
        right.plot(curves["steps"], drawn, "--", color=line.get_color(), label=f"step {k}, drawn")
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel="acceptance on held-out texts", ylim=(0, 1))
    for panel in (left, right):
        panel.legend(frameon=False, fontsize="small")
        panel.spines[["top", "right"]].set_visible(False)
    return figure
