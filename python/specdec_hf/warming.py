"""What calls with a model need, made before the first of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdec_hf.arguments import check_integers
from specdec_hf.decoder import SpeculativeDecoder
from specdec_hf.drafting.registry import AUTO
from specdec_hf.loop.begin import begin
from specdec_hf.loop.statistics import SpecStats
from specdec_hf.request.entry import prepare_call
from specdec_hf.request.inputs import check_language_model

if TYPE_CHECKING:
    from torch.nn import Module

    from specdec_hf.drafting.drafter import Drafter
    from specdec_hf.trees import EagleTree, TreeSpec, TrieTree


def warm_up(
    model: Any,
    batch_sizes: Iterable[int] = (1,),
    *,
    drafter: str | os.PathLike[str] | Module | Drafter | Sequence[Any] | None = AUTO,
    tree: TreeSpec | EagleTree | TrieTree | Sequence[int] | None = None,
    **options: Any,
) -> dict[int, SpecStats]:
    """Make everything that calls with a model need, before the first of them.

    On a CPU the weights of the target and of the model or head that drafts are packed. On a CUDA
    device graphs are made for ``generate(model, ..., compile=True)``, and those of the last batch
    size are kept, see docs/forwards.md#cuda-graphs. Logits are compared with the model's own. Calls
    of these batch sizes and with the same options then do none of that, until the model is changed.

    Args:
        model: causal LM, as in `generate`.
        batch_sizes: numbers B of sequences that calls will have, those of ``num_return_sequences``
            included.
        drafter, tree, options: as in `SpeculativeDecoder`. They decide whether chains or trees are
            verified, which need a comparison each. A drafter that reads a file and is given by its
            name is packed in every call: give the object of the calls.

    Returns:
        The statistics of a call that has not begun, by batch size: ``packed.reason`` or
        ``compiled.eager`` says why such calls run the model's own forwards, empty where they do
        not.

    Raises:
        TypeError: an argument of a wrong type, by name.
        ValueError: a number below 1, no batch size, or options that do not fit the model.

    >>> from specdec_hf import generate, warm_up
    >>> warm_up(model, batch_sizes=(1, 8))  # doctest: +SKIP
    >>> generate(model, **inputs)  # doctest: +SKIP
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
        session = begin(model, call, decoder)
        session.borrower.held = False
        made[size] = session.stats
    return made
