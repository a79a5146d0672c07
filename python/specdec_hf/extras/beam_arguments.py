"""The arguments of beam search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from specdec_hf.arguments import shown


@dataclass(frozen=True)
class BeamArguments:
    """The fields of a complete `GenerationConfig` that only beam search reads.

    Attributes:
        num_beams: beam width w of the target.
        num_return_sequences: how many of the best sequences of each prompt are returned.
        length_penalty: a finished sequence scores its log probability / length ** length_penalty.
        early_stopping: True, False or "never", as in `GenerationConfig`.
        eos_token_ids: as configured, in order.
        fill: id that fills up sequences that ended early.
        own_search: the same search by the model's own ``generate``.
    """

    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool | str
    eos_token_ids: tuple[int, ...]
    fill: int
    own_search: Callable[[], Any]


def read_beams(
    config: GenerationConfig,
    num_beams: int,
    num_return_sequences: int,
    own_search: Callable[[], Any],
) -> BeamArguments:
    """The arguments of beam search.

    Args:
        config: complete, with its special tokens prepared, of several beams.
        num_beams, num_return_sequences: checked.
        own_search: the model's own.

    Raises:
        ValueError: a value out of range, or one that does not go together with beams, by name.
    """
    if config.do_sample:
        raise ValueError(f"do_sample must be False with num_beams={num_beams}, got True")
    if num_return_sequences > num_beams:
        raise ValueError(
            f"num_return_sequences must be at most num_beams={num_beams}, "
            f"got {num_return_sequences}"
        )
    early_stopping: Any = False if config.early_stopping is None else config.early_stopping
    if not (isinstance(early_stopping, bool) or early_stopping == "never"):
        raise ValueError(
            f"early_stopping must be True, False or 'never', got {shown(early_stopping)}"
        )
    eos: Any = config._eos_token_tensor
    pad: Any = config._pad_token_tensor  # that of eos where the config has none
    ids = () if eos is None else tuple(eos.flatten().tolist())
    fill = -1
    if ids:
        fill = int(pad) or ids[0]  # id 0 counts as none, as it does there
    penalty = 1.0 if config.length_penalty is None else float(config.length_penalty)
    return BeamArguments(
        num_beams, num_return_sequences, penalty, early_stopping, ids, fill, own_search
    )
