"""What the first compiled calls with a model need, made before them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from specdec_hf.arguments import check_integers
from specdec_hf.compiled.call import CompileStats
from specdec_hf.decode.begin import begin
from specdec_hf.decode.generate import SpeculativeDecoder
from specdec_hf.drafting.registry import AUTO
from specdec_hf.hf_arguments.language_model import check_language_model
from specdec_hf.hf_arguments.prepare import prepare_call


def warm_up(
    model: Any,
    batch_sizes: Iterable[int] = (1,),
    *,
    drafter: Any = AUTO,
    tree: Any = None,
    **options: Any,
) -> dict[int, CompileStats]:
    """Make everything that compiled calls with a model need, before the first of them.

    Weights are packed, graphs are made for the target and for the model or head that drafts, and
    their logits are compared with eager ones. ``generate(model, ..., compile=True)`` of these batch
    sizes and with the same options then makes no graphs and spends no seconds in a warm-up, until
    the model is changed. On a CPU all batch sizes above 1 share their graphs. On CUDA devices those
    of the last batch size are kept, see docs/compile.md#cuda-graphs.

    Args:
        model: causal LM, as in `generate`.
        batch_sizes: numbers B of sequences that calls will have, those of ``num_return_sequences``
            included.
        drafter, tree, options: as in `SpeculativeDecoder`. They decide whether chains or trees are
            verified, which need a comparison each. A drafter that reads a file and is given by its
            name is packed in every call: give the object of the calls.

    Returns:
        What was made, by batch size; ``stats.compiled.eager`` says why such calls run eagerly,
        empty where they do not.

    Raises:
        TypeError: an argument of a wrong type, by name.
        ValueError: a number below 1, no batch size, or options that do not fit the model.
        RuntimeError: a drafter that a call is using.

    >>> from specdec_hf import generate, warm_up
    >>> warm_up(model, batch_sizes=(1, 8))  # doctest: +SKIP
    >>> generate(model, **inputs, compile=True)  # doctest: +SKIP
    """
    check_language_model("model", model)
    sizes = check_integers("batch_sizes", batch_sizes, 1)
    if not sizes:
        raise ValueError("batch_sizes must have at least one number, got none")
    decoder = SpeculativeDecoder(drafter, tree=tree, compile=True, **options)
    made = {}
    for size in sizes:
        ids = torch.zeros(size, 2, dtype=torch.int64, device=model.device)
        call = prepare_call(
            model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False,
            num_beams=1, num_return_sequences=1,
        )  # fmt: skip
        session = begin(model, call, decoder.options)
        session.lease.release()
        assert session.stats.compiled is not None
        made[size] = session.stats.compiled
    return made
