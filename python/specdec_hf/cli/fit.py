"""The command ``check``: which caches of the loop fit a model, as the self-check measures it."""

# ruff: noqa: PLC0415  # torch loads at first use; see app.py
from __future__ import annotations

from specdec_hf.cli.checks import Settings, Sources
from specdec_hf.cli.run import load_models, progress_bar
from specdec_hf.cli.terminal import FAILED, console, fail, visible


def check_fits(settings: Settings, sources: Sources) -> None:
    """Load a model, compare it with itself through each cache, and print the result."""
    with progress_bar() as say:
        loaded = load_models(settings, sources, say)
        from specdec_hf.cache.check_model import check_model

        say("comparing")
        result = check_model(loaded.model)
    console.print(visible(f"{loaded.title}, {loaded.dtype}, {loaded.model.device}"), style="bold")
    console.print(visible(str(result)), soft_wrap=True)
    if all(fit.reason for fit in result.fits.values()):
        fail(f"no cache fits {loaded.title}", FAILED)
