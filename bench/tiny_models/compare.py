"""Whether text of the loop equals plain generation of a model, in every way of calling the loop."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf import SpeculativeDecoder, TrieTree, generate
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Draft, State, StatelessDrafter

from bench.tiny_models.config import ORDINARY, PAD

NEW = 16
GAMMA = 4
LENGTHS = (9, 5, 11)  # of a batch; the first is the single prompt's

Inputs = dict[str, torch.Tensor]


class OracleDrafter(StatelessDrafter):
    """Drafts the right text with every third token wrong, and another number for each sequence.

    Acceptance, rejection and rollback so occur in every call, at other places in every sequence.

    Args:
        texts: [B, N] the text that plain decoding gives after each prompt. The round that reads the
            prompt has given the first token when a text is drafted first.
        first_wrong: index of the first wrong token.
    """

    def __init__(self, texts: np.ndarray, first_wrong: int = 2) -> None:
        self.texts = texts.copy()
        self.wrong = self.texts.copy()
        columns = np.arange(first_wrong, texts.shape[1], 3)
        low, high = ORDINARY
        self.wrong[:, columns] = (texts[:, columns] - low + 7) % (high - low) + low
        self.starts: np.ndarray | None = None

    def begin(self, call: DrafterCall) -> State:
        self.starts = None
        return self

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        gamma = int(limits.max())
        if self.starts is None:
            self.starts = history.lengths - 1
        tokens = np.full((len(history.lengths), gamma), -1, dtype=np.int64)
        counts = np.zeros(len(history.lengths), dtype=np.int64)
        for b, done in enumerate(history.lengths - self.starts):
            found = self.wrong[b, done : done + gamma - (b + int(done)) % 2]
            tokens[b, : len(found)], counts[b] = found, len(found)
        return Draft(torch.from_numpy(tokens), counts=counts) if counts.any() else None


@dataclass
class Outcome:
    """The outcome of one call: "equal", "refused", "WRONG", "CRASH" or "plain fails"."""

    status: str
    detail: str = ""


def prompts(lengths: tuple[int, ...], seed: int = 1) -> Inputs:
    """Random left-padded prompts of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros_like(ids)
    for b, length in enumerate(lengths):
        ids[b, width - length :] = torch.randint(*ORDINARY, (length,), generator=generator)
        mask[b, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def plain(model: Any, inputs: Inputs, new: int = NEW) -> torch.Tensor:
    """The text of ``model.generate``, greedy."""
    output = model.generate(**inputs, max_new_tokens=new, do_sample=False)
    sequences: torch.Tensor = getattr(output, "sequences", output)
    return sequences


def calls(expected: torch.Tensor, columns: int) -> dict[str, Callable[[Any, Inputs], Any]]:
    """Name -> each way of calling the loop; the result is a tensor or has ``sequences``."""
    texts = expected[:, columns:].numpy()
    common: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    chain = {"num_assistant_tokens": GAMMA, "guard": False}
    tree = {"tree": TrieTree(sequences=2, depth=GAMMA), "guard": False}

    def two() -> list[OracleDrafter]:
        return [OracleDrafter(texts, 2), OracleDrafter(texts, 1)]

    def custom(model: Any, inputs: Inputs) -> Any:
        undrafted = model.generate(**inputs, **common, custom_generate=SpeculativeDecoder(None))
        if not torch.equal(getattr(undrafted, "sequences", undrafted), expected):
            return undrafted
        decoder = SpeculativeDecoder(OracleDrafter(texts), **chain)
        return model.generate(**inputs, **common, custom_generate=decoder)

    def returned(model: Any, inputs: Inputs) -> Any:
        output = generate(
            model,
            **inputs,
            **common,
            drafter=OracleDrafter(texts),
            **chain,
            return_dict_in_generate=True,
        )
        # Whisper leaves the prompt of its decoder out of a tensor, and not out of this output.
        return output if columns else output.sequences[:, -NEW:]

    return {
        "none": lambda model, inputs: generate(model, **inputs, **common, drafter=None),
        "draft": lambda model, inputs: generate(
            model, **inputs, **common, drafter=OracleDrafter(texts), **chain
        ),
        "tree": lambda model, inputs: generate(model, **inputs, **common, drafter=two(), **tree),
        "custom": custom,
        "dict": returned,
    }


def compare(model: Any, inputs: Inputs, names: tuple[str, ...]) -> Iterator[tuple[str, Outcome]]:
    """Each way of calling the loop on some inputs, against plain generation."""
    try:
        expected = plain(model, inputs)
    except Exception as error:
        for name in names:
            yield name, Outcome("plain fails", _message(error))
        return
    # Those of an encoder-decoder are its decoder's.
    columns = expected.shape[1] - NEW
    ways = calls(expected, columns)
    for name in names:
        yield name, outcome_of(lambda name=name: ways[name](model, dict(inputs)), expected, columns)


def outcome_of(call: Callable[[], Any], expected: torch.Tensor, columns: int) -> Outcome:
    """Run one call and compare its text."""
    try:
        output = call()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        ours = "specdec_hf" in last or "specdec_kernels" in last
        if ours and isinstance(error, ValueError | TypeError):
            return Outcome("refused", " ".join(str(error).split()))
        return Outcome("CRASH", _message(error))
    got = getattr(output, "sequences", output)
    if got.shape == expected.shape and torch.equal(got, expected):
        return Outcome("equal")
    if got.shape != expected.shape:
        return Outcome("WRONG", f"shape {list(got.shape)}, plain {list(expected.shape)}")
    b, at = (got != expected).nonzero()[0].tolist()
    return Outcome("WRONG", f"row {b} token {at - columns}")


def _message(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    place = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return f"{type(error).__name__} in {place}: {text[:200]}"
