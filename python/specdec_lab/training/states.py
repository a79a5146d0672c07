"""The target's hidden states over all conversations, in one file that is mapped into memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.runner.protocol import vocab_size_of
from torch.nn import functional

from specdec_lab.training.conversations import TrainingText

TOKENS_AT_ONCE = 4096  # of one forward, padding included
CHECKED = 64  # tokens of the check of a target


@torch.no_grad()
def check_output(model: Any) -> None:
    """Refuse a target whose logits are not those of its output matrix, which labels are made with.

    Raises:
        ValueError: it adds a bias, or its logits differ by more than one rounding: they are scaled,
            capped or shifted.
    """
    output = model.get_output_embeddings()
    if getattr(output, "bias", None) is not None:
        raise ValueError(
            "model must give its logits by its output matrix alone, and that of "
            f"{type(model).__name__} has a bias of {tuple(output.bias.shape)}"
        )
    tokens = torch.arange(min(CHECKED, vocab_size_of(model)), device=model.device)[None]
    final = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    logits = functional.linear(final, output.weight).float()
    own = model(input_ids=tokens, use_cache=False).logits.float()
    difference, largest = (float(x.abs().max()) for x in (own - logits, own))
    if not difference <= torch.finfo(model.dtype).eps * largest:  # it is the same product
        raise ValueError(
            "model must give its logits by its output matrix alone, and those of "
            f"{type(model).__name__} differ by up to {difference:.3g} of {largest:.3g}"
        )


def width_of(path: Path, conversations: Sequence[TrainingText], wanted: int) -> int:
    """The numbers of a row of a file of states, ``wanted`` of them where there is no file.

    A file that was written for another kind of head holds more states in a row, the final one last.

    Raises:
        ValueError: states of another kind of head are missing, which this one cannot add.
    """
    lengths = np.array([len(one.tokens) for one in conversations])
    if not path.exists() or path.stat().st_size == 2 * int(lengths.sum()) * wanted:
        return wanted
    done, total = _batches_done(path), len(_batches(lengths))
    if done < total:
        raise ValueError(
            f"{path} must hold the states of all texts, and its run was interrupted after {done} "
            f"of {total} batches"
        )
    return path.stat().st_size // (2 * int(lengths.sum()))


class StoredStates:
    """Rows of bfloat16: for each token the states after the chosen layers, then the final one.

    The final state is the input of the target's output matrix, so that its logits can be computed
    again for any part of the vocabulary.

    Args:
        path: the file; one beside it counts what has been written.
        conversations: whose tokens the rows belong to, one after the other.
        width: numbers of a row.

    Raises:
        ValueError: a file that was begun and has another size.
    """

    def __init__(self, path: Path, conversations: Sequence[TrainingText], width: int) -> None:
        self.lengths = np.array([len(one.tokens) for one in conversations])
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._path, self._done = path, path.with_suffix(".json")
        total = int(self.starts[-1])
        size, wanted = path.stat().st_size if path.exists() else 0, 2 * total * width
        if self.batches_done and size != wanted:
            raise ValueError(
                f"{path} must have {wanted} bytes, for {total} tokens, got {size}: remove "
                f"{self._done} to make it again"
            )
        self.rows = torch.from_file(
            str(path), shared=True, size=total * width, dtype=torch.bfloat16
        ).view(total, width)

    def of(self, number: int) -> torch.Tensor:
        """The rows [n, width] of one conversation."""
        return self.rows[self.starts[number] : self.starts[number + 1]]

    @property
    def batches_done(self) -> int:
        """How many batches of `fill` have been written."""
        return _batches_done(self._path)

    @torch.inference_mode()
    def fill(
        self,
        model: Any,
        conversations: Sequence[TrainingText],
        layers: Sequence[int],
        advance: Callable[[int], None],
    ) -> None:
        """Compute the rows that are missing.

        Args:
            model: the target.
            conversations: as in the constructor.
            layers: after which the states are taken.
            advance: told how many tokens were done.
        """
        decoder = model.get_decoder()
        written = self.batches_done
        for number, batch in enumerate(_batches(self.lengths)):
            if number >= written:
                longest = int(self.lengths[batch].max())
                ids = np.zeros((len(batch), longest), dtype=np.int64)
                for row, one in enumerate(batch):
                    ids[row, : self.lengths[one]] = conversations[one].tokens
                out = decoder(
                    input_ids=torch.from_numpy(ids).to(model.device),
                    output_hidden_states=True,
                    use_cache=False,
                )
                chosen = [*(out.hidden_states[i] for i in layers), out.last_hidden_state]
                states = torch.cat(chosen, dim=-1).to("cpu", torch.bfloat16)
                for row, one in enumerate(batch):
                    self.of(one)[:] = states[row, : self.lengths[one]]
                self._done.write_text(json.dumps({"batches": number + 1}))
            advance(int(self.lengths[batch].sum()))


def _batches_done(path: Path) -> int:
    done = path.with_suffix(".json")
    return int(json.loads(done.read_text())["batches"]) if done.exists() else 0


def _batches(lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Numbers of conversations of similar length, so that little is padding."""
    order = np.argsort(-lengths, kind="stable")
    batches, first = [], 0
    while first < len(order):
        size = max(1, TOKENS_AT_ONCE // int(lengths[order[first]]))
        batches.append(order[first : first + size])
        first += size
    return batches
