"""The training loop: optimiser, schedule, batches, checkpoints and held-out measurements."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from specdec_hf.heads.base import Head
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset
from transformers import get_cosine_schedule_with_warmup
from transformers.trainer_pt_utils import LengthGroupedSampler

from specdec_lab.training.conversations import TrainingText
from specdec_lab.training.draft_model import DraftLlama
from specdec_lab.training.settings import FORWARD_KL
from specdec_lab.training.states import StoredStates
from specdec_lab.training.unrolled import TrainingBatch, acceptance_of, covered_by, loss_of

WARM_UP = 0.04  # share of the steps
CLIP = 1.0
BETAS = (0.9, 0.95)
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # of AdamW
PACE_STEPS = 20  # show how long a step takes, where the time is bounded
# Share of the steps before another loss, made with this one: the gradient of reverse_kl and of
# total_variation has the factor Q, so a drafter that knows nothing learns next to nothing by them.
FIRST_SHARE, FIRST_LOSS = 0.5, FORWARD_KL


@dataclass
class Recipe:
    """How a head is trained.

    Attributes:
        steps: of the optimiser.
        batch_size: texts of a step.
        draft_steps: draft steps that the loss unrolls.
        learning_rate: the largest one.
        seed: of the order of the texts.
        autocast: dtype of the matrix products; None for float32.
        measure_every: steps between two measurements on held-out texts, and two checkpoints.
        loss: one of `LOSSES`; the first half of the steps has "forward_kl".
    """

    steps: int
    batch_size: int = 4
    draft_steps: int = 3
    learning_rate: float = 2e-3
    seed: int = 0
    autocast: torch.dtype | None = None
    measure_every: int = 100
    loss: str = FIRST_LOSS

    def loss_at(self, step: int, total: int) -> str:
        """The loss of a step, from 1, of so many."""
        return FIRST_LOSS if step <= FIRST_SHARE * total else self.loss


@dataclass
class Curves:
    """What was measured; each list has an entry for each time.

    Attributes:
        loss_steps, losses: steps, and the mean loss of each draft step since the last one.
        loss_names: of the losses, among `LOSSES`. Values of different losses are never averaged:
            where the loss changes, an entry ends.
        steps, greedy, shared: steps, and the held-out acceptance of each draft step: of greedy
            drafts, and of drafts that are drawn at temperature 1.
        covered: where there are earlier draft models, the held-out share of places at which one of
            all drafts the target's choice.
    """

    loss_steps: list[int] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    loss_names: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    greedy: list[list[float]] = field(default_factory=list)
    shared: list[list[float]] = field(default_factory=list)
    covered: list[float] = field(default_factory=list)

    def cut(self, step: int) -> None:
        """Forget what was measured after a step."""
        losses: list[list[Any]] = [self.losses, self.loss_names]
        measured: list[list[Any]] = [self.greedy, self.shared, self.covered]
        for steps, curves in ((self.loss_steps, losses), (self.steps, measured)):
            kept = sum(one <= step for one in steps)
            del steps[kept:]
            for curve in curves:
                del curve[kept:]


class Texts(Dataset[tuple[TrainingText, torch.Tensor]]):
    """Conversations and their stored states as a dataset."""

    def __init__(
        self, conversations: Sequence[TrainingText], states: StoredStates, chosen: Sequence[int]
    ) -> None:
        self.conversations, self.states, self.chosen = conversations, states, list(chosen)
        self.lengths = [len(conversations[n].tokens) for n in self.chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, item: int) -> tuple[TrainingText, torch.Tensor]:
        number = self.chosen[item]
        return self.conversations[number], self.states.of(number)


class Collator:
    """Makes a `TrainingBatch` of texts.

    Args:
        embeddings: the target's input embeddings.
        width: of a hidden state of the target.
        device: where the batch goes.
        cuts: places of each text to draft at; 0 is all.
        size: least tokens T of a batch, more than the draft steps; texts may be shorter.
    """

    def __init__(
        self, embeddings: Any, width: int, device: torch.device, cuts: int = 0, size: int = 0
    ) -> None:
        self.embeddings, self.width, self.device, self.cuts = embeddings, width, device, cuts
        self.size = size

    @torch.no_grad()
    def __call__(self, texts: Sequence[tuple[TrainingText, torch.Tensor]]) -> TrainingBatch:
        pad = torch.nn.utils.rnn.pad_sequence
        tokens = pad([torch.tensor(one.tokens) for one, _ in texts], batch_first=True)
        rows = pad([states for _, states in texts], batch_first=True).to(self.device)
        more = max(self.size - tokens.shape[1], 0)
        tokens = functional.pad(tokens.to(self.device), (0, more))
        rows = functional.pad(rows, (0, 0, 0, more))
        return TrainingBatch(
            tokens,
            self.embeddings(tokens).float(),
            rows[..., : -self.width].float(),
            rows[..., -self.width :],
            torch.tensor([len(one.tokens) for one, _ in texts], device=self.device),
            torch.tensor([one.answer for one, _ in texts], device=self.device),
            self._places([one for one, _ in texts]) if self.cuts else None,
        )

    def _places(self, texts: Sequence[TrainingText]) -> torch.Tensor:
        """[B, cuts], at random; they follow from which texts these are, also in a later run."""
        seed = hash(tuple(one.number for one in texts)) % 2**63
        generator = torch.Generator("cpu").manual_seed(seed)
        shares = torch.rand((len(texts), self.cuts), generator=generator, device="cpu")
        sizes = torch.tensor([[len(one.tokens) - 1] for one in texts], device="cpu")
        return (shares * sizes).long().to(self.device)


@dataclass
class Trainer:
    """Trains a head in place; goes on from a checkpoint where there is one.

    Attributes:
        head: float32, in the state to begin with.
        training, held_out: texts.
        collate: makes batches.
        output: [V, E], the target's output matrix.
        recipe: numbers of the training.
        checkpoint: file of the state, written at each measurement.
        curves: takes the measurements; those of an interrupted run precede them.
        earlier: draft models, whose misses alone count in training; see `loss_of`.
        change: gives the batch that a step, from 1, reads in the place of its own.
        advance: called after each step with its number and its loss, by name and value.
        measured: called after each measurement, before the checkpoint is written.
        minutes: a bound on the time; the steps are cut to what the first ones show to fit. A run
            that goes on keeps the number that they were cut to.
    """

    head: Head
    training: Texts
    held_out: Texts
    collate: Collator
    output: torch.Tensor
    recipe: Recipe
    checkpoint: Path
    curves: Curves
    earlier: Sequence[Any] = ()
    change: Callable[[int, TrainingBatch], TrainingBatch] | None = None
    advance: Callable[[int, str, float], None] = lambda step, name, loss: None
    measured: Callable[[Curves], None] = lambda curves: None
    minutes: float | None = None

    def __post_init__(self) -> None:
        rate, weights = self.recipe.learning_rate, list(self.head.parameters())
        groups = [{"params": weights, "initial_lr": rate}]
        self._optimizer = torch.optim.AdamW(groups, lr=rate, betas=BETAS, weight_decay=0.01)
        # The losses since the last entry of the curves, and their name.
        self._losses: list[torch.Tensor] = []
        self._name = ""

    def run(self) -> None:
        """Train.

        Raises:
            FloatingPointError: the loss, the gradient or a weight is not finite, by step and value.
        """
        head, recipe = self.head, self.recipe
        first, cut = load_checkpoint(self.checkpoint, head, self._optimizer)
        total = recipe.steps if cut is None else min(cut, recipe.steps)
        self.curves.cut(first)
        if first >= total:
            head.eval()
            return
        began = time.monotonic()
        schedule = _schedule(self._optimizer, total, first)
        head.train()
        if recipe.autocast is not None:
            head.lm_head = head.lm_head.to(recipe.autocast)  # once, and not for every product
        batches = _batches(self.training, self.collate, recipe, first)
        for step, batch in enumerate(batches, start=first + 1):
            self._step(step, batch, recipe.loss_at(step, total))
            schedule.step()
            bound = self.minutes if cut is None and step == first + PACE_STEPS else None
            if bound is not None:
                pace = (time.monotonic() - began) / PACE_STEPS
                cut = total = min(total, step + max(1, int(bound * 60 / pace) - PACE_STEPS))
                schedule = _schedule(self._optimizer, total, step)
            if bound is not None or step % recipe.measure_every == 0 or step >= total:
                self._measure(step)
                save_checkpoint(self.checkpoint, head, self._optimizer, step, cut)
            if step >= total:
                break
        head.eval()

    def _step(self, step: int, batch: TrainingBatch, name: str) -> None:
        """One step of the optimiser by the loss of this name."""
        if name != self._name:
            self._end_entry(step - 1)
            self._name = name
        given = batch if self.change is None else self.change(step, batch)
        with self._autocast():
            draft_steps = self.recipe.draft_steps
            loss, losses = loss_of(self.head, given, draft_steps, name, self.earlier)
        _check_finite("loss", step, loss)
        self._optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(self.head.parameters(), CLIP)
        _check_finite("norm of the gradient", step, norm)
        self._optimizer.step()
        self._losses.append(torch.stack(losses).float().cpu())
        self.advance(step, name, loss.item())

    def _end_entry(self, step: int) -> None:
        """Add the mean loss of the steps since the last entry to the curves."""
        if self._losses:
            self.curves.loss_steps.append(step)
            self.curves.losses.append(torch.stack(self._losses).mean(dim=0).tolist())
            self.curves.loss_names.append(self._name)
            self._losses = []

    def _measure(self, step: int) -> None:
        """Add the acceptance on held-out texts to the curves."""
        self._end_entry(step)
        for weight in self.head.parameters():  # what no later step has read
            _check_finite("sum of a weight", step, weight.sum())
        self.head.eval()
        sums, covered = torch.zeros(3, self.recipe.draft_steps), torch.zeros(2)
        for batch in DataLoader(self.held_out, self.recipe.batch_size, collate_fn=self.collate):
            with self._autocast():
                found = acceptance_of(self.head, batch, self.recipe.draft_steps, self.output)
                sums += torch.stack(found)
                if self.earlier:
                    assert isinstance(self.head, DraftLlama)
                    covered += covered_by([*self.earlier, self.head.llama], batch, self.output)
        self.head.train()
        greedy, shared, count = sums
        self.curves.steps.append(step)
        self.curves.greedy.append((greedy / count.clamp(min=1)).tolist())
        self.curves.shared.append((shared / count.clamp(min=1)).tolist())
        if self.earlier:
            self.curves.covered.append(float(covered[0] / covered[1].clamp(min=1)))
        self.measured(self.curves)

    def _autocast(self) -> torch.autocast:
        dtype = self.recipe.autocast
        return torch.autocast(self.collate.device.type, dtype, enabled=dtype is not None)


def _check_finite(what: str, step: int, value: torch.Tensor) -> None:
    if not torch.isfinite(value):
        raise FloatingPointError(
            f"training has diverged: the {what} in step {step} is {value.item()}"
        )


def _schedule(
    optimizer: torch.optim.Optimizer, total: int, done: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Cosine with warm-up, as after ``done`` steps."""
    schedule: torch.optim.lr_scheduler.LambdaLR = get_cosine_schedule_with_warmup(
        optimizer, max(1, int(WARM_UP * total)), total, last_epoch=done - 1
    )
    return schedule


def _batches(
    texts: Texts, collate: Collator, recipe: Recipe, first: int
) -> Iterator[TrainingBatch]:
    """Batches without end, from number ``first``; their order follows from the seed alone."""
    epoch = 0
    per_epoch = -(-len(texts) // recipe.batch_size)
    while True:
        generator = torch.Generator().manual_seed((recipe.seed << 16) + epoch)
        order = list(
            LengthGroupedSampler(recipe.batch_size, lengths=texts.lengths, generator=generator)
        )
        done = max(0, first - epoch * per_epoch)
        if done < per_epoch:
            yield from DataLoader(
                texts, recipe.batch_size, sampler=order[done * recipe.batch_size :],
                collate_fn=collate,
            )  # fmt: skip
        epoch += 1


def save_checkpoint(
    path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, step: int, cut: int | None
) -> None:
    """Write a checkpoint; one that was there is replaced once this one is whole.

    Args:
        path: of the file.
        module, optimizer: whose state is written.
        step: how many steps were made.
        cut: to how many steps a bound on the time cut the training; None where it did not yet.
    """
    tensors = {}
    for name, weight in module.named_parameters():
        tensors[f"weight/{name}"] = weight.detach()
        for kind, value in optimizer.state.get(weight, {}).items():
            tensors[f"{kind}/{name}"] = value
    staging = path.with_suffix(".new")
    numbers = {"step": str(step)} | ({} if cut is None else {"cut": str(cut)})
    save_file({name: x.contiguous() for name, x in tensors.items()}, staging, numbers)
    os.replace(staging, path)


def load_checkpoint(
    path: Path, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, int | None]:
    """Restore module and optimiser; returns ``step`` and ``cut`` of `save_checkpoint`.

    They are 0 and None without a checkpoint.
    """
    if not path.exists():
        return 0, None
    with safe_open(path, framework="pt") as file:
        numbers = {name: int(value) for name, value in file.metadata().items()}
        for name, weight in module.named_parameters():
            with torch.no_grad():
                weight.copy_(file.get_tensor(f"weight/{name}"))
            state: dict[str, Any] = optimizer.state[weight]
            for kind in MOMENTS:
                value = file.get_tensor(f"{kind}/{name}")
                # AdamW counts steps on the host.
                state[kind] = value if kind == "step" else value.to(weight.device)
    return numbers["step"], numbers.get("cut")
