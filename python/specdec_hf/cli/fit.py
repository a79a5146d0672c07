"""The command ``check``: which caches of the loop fit a model, as the self-check measures it."""

# ruff: noqa: PLC0415  # torch loads at first use; see app.py
from __future__ import annotations

from rich.table import Column, Table

from specdec_hf.cli.checks import Settings, Sources
from specdec_hf.cli.run import load_models, progress_bar
from specdec_hf.cli.terminal import FAILED, console, fail, visible


def check_fits(settings: Settings, sources: Sources) -> None:
    """Load a model, compare it with itself through each cache, and print a table."""
    with progress_bar() as say:
        loaded = load_models(settings, sources, say)
        from specdec_hf.cache.make import ROLLBACK_KINDS
        from specdec_hf.cache.self_check import check_fit

        say("comparing")
        checks = [(kind, kind, False) for kind in ROLLBACK_KINDS] + [("spec", "spec, trees", True)]
        fits = {name: check_fit(loaded.model, kind, tree=tree) for kind, name, tree in checks}
    console.print(
        visible(f"{type(loaded.model).__name__}, {loaded.dtype}, {loaded.model.device}"),
        style="bold",
    )
    table = Table(
        "cache", "fits", "difference", "tolerance", Column("why", overflow="fold"),
        box=None, padding=(0, 2, 0, 0),
    )  # fmt: skip
    for name, fit in fits.items():
        verdict = "no" if fit.reason else "not checked" if fit.unchecked else "yes"
        numbers = [f"{x:.1e}" if x is not None else "" for x in (fit.difference, fit.tolerance)]
        why = fit.reason or fit.unchecked or fit.remark or ""
        table.add_row(name, verdict, *numbers, visible(why))
    console.print(table)
    if all(fit.reason for fit in fits.values()):
        fail(f"no cache fits {loaded.title}", FAILED)
