"""What is trained, and on how much.

This module does without torch, because the command line reads it before it loads torch.
"""

from __future__ import annotations

from dataclasses import dataclass

DRAFT_MODEL = "draft_model"  # among the kinds of heads
FORWARD_KL = "forward_kl"
LOSSES = (FORWARD_KL, "reverse_kl", "total_variation")
LARGEST_LEARNING_RATE = 1e37  # AdamW divides it by 0.1 in float32
WORK = "work"  # folder of what the stages leave behind
RUN = "run.json"  # in it: settings, times and measurements


@dataclass(frozen=True)
class TrainingSettings:
    """What is trained, and on how much.

    Attributes:
        head: the kind, one of `KINDS`.
        tokens: of all texts; the target writes 20 texts in any case.
        length: most tokens of a text.
        turn_length: most tokens of a user's turn that the target writes.
        rows: texts that are written at once.
        epochs: times that the training reads all texts.
        steps: of training; None follows from `epochs`.
        batch_size: texts of a training step.
        draft_steps: draft steps that the loss unrolls, or heads or look-ahead embeddings.
        learning_rate: the largest one.
        draft_vocab_size: tokens that can be drafted; a draft model drafts all.
        seed: of texts and training.
        layer: after which an early exit is; None is a third of the target's.
        loss: one of `LOSSES`; see `Recipe`.
        openings: share of the users' turns that begin with words of `openings.OPENINGS`.
        on_policy: share of the training steps whose answers the draft model writes.
        width, num_layers: of a draft model.
    """

    head: str = "eagle3"
    tokens: int = 900_000
    length: int = 384
    turn_length: int = 96
    rows: int = 128
    epochs: float = 4.0
    steps: int | None = None
    batch_size: int = 4
    draft_steps: int = 3
    learning_rate: float = 2e-3
    draft_vocab_size: int = 8192
    seed: int = 0
    layer: int | None = None
    loss: str = FORWARD_KL
    openings: float = 0.0
    on_policy: float = 0.0
    width: int = 128
    num_layers: int = 2
