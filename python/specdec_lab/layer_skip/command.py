"""The command ``build layer_skip``: which layers a model leaves out where it drafts for itself."""

# ruff: noqa: PLC0415  # torch and Transformers load at first use; see cli/app.py
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from specdec_hf.cli import options
from specdec_hf.cli.checks import check_sampling_value
from specdec_hf.cli.devices import find_device
from specdec_hf.cli.options import SEED, at_least, must_be, option
from specdec_hf.cli.sources import find_model
from specdec_hf.cli.terminal import bar, console, fail
from specdec_papers.build import Files, Output, read_texts

if TYPE_CHECKING:
    from pathlib import Path

    from specdec_lab.layer_skip.calibration import Drafting, LayerSearchResult


def build_layer_skip(
    files: Files,
    output: Output,
    model: options.ModelName = "embedded",
    evaluations: Annotated[
        int, option("--evaluations N", "Sets of layers to measure.", at_least(1))
    ] = 200,
    tokens: Annotated[int, option("--tokens N", "Tokens of the texts to measure on.")] = 1024,
    length: Annotated[int, option("--length N", "Tokens of a piece.", at_least(2))] = 128,
    max_draft: Annotated[
        int,
        option(
            "--max-draft N",
            "Most drafts of a round.",
            at_least(1),
            must_be("at most 1024", lambda number: number <= 1024),
        ),
    ] = 12,
    temperature: options.Temperature = 0.0,
    seed: Annotated[int, option("--seed N", "Of the search.", SEED)] = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
) -> None:
    """Search for the layers to leave out, for --drafter layer_skip:FILE.

    Attention and MLP of each layer but the first are left out or not, for the most tokens for their
    cost on these texts. A fourth of the texts is held out.
    """
    if tokens < 2 * length:
        fail(f"--tokens must be at least twice --length = {length}, got {tokens}")
    check_sampling_value("temperature", temperature)
    texts, _, _ = read_texts(files, output, model)
    pieces = cut_pieces([text.tolist() for text in texts], tokens, length)
    if len(pieces) < 2:
        fail(
            f"FILES must hold at least two pieces of --length = {length} tokens, got {len(pieces)}"
        )
    found = _search(
        model, pieces, dtype, device, evaluations=evaluations, max_draft=max_draft,
        temperature=temperature, seed=seed,
    )  # fmt: skip
    found.skipped.save(output)
    _print(found, output)


def cut_pieces(texts: list[list[int]], tokens: int, length: int) -> list[list[int]]:
    """Whole pieces of the texts, spread evenly over them.

    Args:
        texts: tokens of each.
        tokens: most tokens of all pieces.
        length: tokens of a piece.
    """
    pieces = [
        text[begin : begin + length]
        for text in texts
        for begin in range(0, len(text) - length + 1, length)
    ]
    count = min(len(pieces), tokens // length)
    return [pieces[n * len(pieces) // count] for n in range(count)]


def _search(
    name: str, pieces: list[list[int]], dtype: str, device: str | None, **settings: Any
) -> LayerSearchResult:
    import torch
    from specdec_hf.cli.load import check_length, read_config
    from specdec_hf.model_files import load_model

    from specdec_lab.layer_skip.calibration import search_layers

    source, placed = find_model("--model", name), find_device(device)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with bar(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("loading", total=settings["evaluations"])
        path, config = read_config(source, lambda text: progress.update(task, description=text))
        check_length(len(pieces[0]), config)
        chosen = dtype if dtype == "auto" else getattr(torch, dtype)
        model = load_model(path, device=placed, dtype=chosen)
        progress.update(task, description="measuring")

        def advance(done: int, best: Drafting) -> None:
            progress.update(task, completed=done, description=f"best {best.speed:.3f}")

        try:
            return search_layers(model, pieces, advance=advance, **settings)
        except ValueError as error:
            fail(str(error))


def _print(found: LayerSearchResult, output: Path) -> None:
    skipped, total = found.skipped, found.skipped.model["num_hidden_layers"]
    console.print(
        f"{output}: of {total} layers {len(skipped.attention)} attention and {len(skipped.mlp)} "
        f"MLP sublayers are left out, after {found.tried} trials"
    )
    for name, drafting in (("on the texts", found.drafting), ("on held-out texts", found.held_out)):
        console.print(
            f"{name}: acceptance rate {drafting.alpha:.3f}, a draft costs {drafting.cost:.3f} of "
            f"a forward, {drafting.speed:.3f} times plain decoding with {drafting.gamma} drafts"
        )
    if found.held_out.gamma == 0:
        console.print("drafts of this model do not pay for themselves; another drafter may")
