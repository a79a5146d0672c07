"""The stages of training a head, each of which goes on where an interrupted run stopped."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdec_hf.heads.base import Head
from specdec_hf.heads.shipped import Sample, record_target
from specdec_hf.lab.training.conversations import ChatFormat, Conversation, converse
from specdec_hf.lab.training.kinds import KINDS
from specdec_hf.lab.training.states import StoredStates
from specdec_hf.lab.training.texts import (
    HELD_OUT,
    append_conversations,
    check_held_out,
    check_prompts,
    cut_texts,
    draft_vocabulary,
    holds_out_some,
    is_held_out,
    read_conversations,
)
from specdec_hf.lab.training.train import Collator, Curves, Recipe, Texts, train
from specdec_hf.runner.protocol import vocab_size_of

WORK = "work"  # folder of what the stages leave behind
RUN = "run.json"  # in it: settings, times and measurements
SAMPLING_SHARE = 0.5  # of the time, where it is bounded
MEASUREMENTS = 12  # on held-out texts during training
MEASURED = 48  # texts of each
SAMPLED = 64  # numbers of each weight that tell models apart
# Fields of a config that change nothing in what the model computes, or are given elsewhere.
_LEFT_OUT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


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
        draft_vocab_size: tokens that can be drafted.
        seed: of texts and training.
        layer: after which an early exit is; None is a third of the target's.
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


class Progress:
    """How the pipeline tells what it does; the command line shows it."""

    def stage(self, text: str, total: int) -> None:
        """A stage of ``total`` units begins."""

    def advance(self, done: int, text: str = "") -> None:
        """So many units of the stage are done in all."""


class Pipeline:
    """One run of training in a folder.

    Args:
        model: the target.
        tokenizer: its tokenizer.
        folder: where the head goes; what the stages leave is in its folder ``work``.
        settings: must be those that the folder was begun with.
        progress: told what happens.
        minutes: a bound on the whole; None means none.

    Attributes:
        curves: what the training measured.
        seconds: time of each stage, that of interrupted runs included.

    Raises:
        ValueError: a folder that was begun with other settings, or a target that does not fit.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        folder: Path,
        settings: TrainingSettings,
        progress: Progress,
        minutes: float | None = None,
    ) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.folder, self.progress = folder, progress
        self.work = folder / WORK
        self.work.mkdir(parents=True, exist_ok=True)
        self.curves, self.seconds, self._complete = Curves(), dict[str, float](), False
        self._run_file, self._origin = self.work / RUN, dict[str, str]()
        check_begun(folder, settings)
        if self._run_file.exists():
            run = json.loads(self._run_file.read_text())
            self.seconds, self._complete = run["seconds"], run["complete"]
            self.curves = Curves(**run["curves"])
            self._origin = run.get("origin", {})
        self._end = None if minutes is None else time.monotonic() + minutes * 60 - self.spent

    @property
    def spent(self) -> float:
        """Seconds of all stages so far."""
        return sum(self.seconds.values())

    def run(self, prompts: Sequence[str] = (), texts: Sequence[str] = ()) -> Head:
        """All stages; returns the head, which is written to the folder.

        Args:
            prompts: users' turns for the target to answer; without, it writes them.
            texts: texts to train on, in place of the target's own.

        Raises:
            ValueError: a folder that was begun with another target, dtype or other data, texts
                that do not fit, or too few of them.
        """
        origin = origin_of(self.model, prompts, texts)
        if self._run_file.exists():
            check_origin(self.folder, self._origin, origin)
        self._origin = origin
        check_prompts(prompts)
        given = [] if self._complete else list(self._written(texts))
        if texts and not self._complete:
            check_held_out(given, "more or longer texts are needed")
        with torch.random.fork_rng(devices=[]):
            self._head([])  # refuses a target that no head fits before texts are written
        with self._timed("texts"):
            conversations = self._texts(prompts, given)
        head = self._head(conversations)
        with self._timed("states"):
            states = self._states(conversations, head)
        with self._timed("training"):
            self._train(head, conversations, states)
        KINDS[self.settings.head].save(head, self.folder)
        held_out = [one for one in conversations if is_held_out(one)]
        longest = max(held_out, key=lambda one: len(one.tokens) - one.answer)
        sample = Sample(longest.tokens, min(max(longest.answer, 2), len(longest.tokens)))
        record_target(self.folder, self.model, sample)
        return head

    def _texts(self, prompts: Sequence[str], given: Sequence[Conversation]) -> list[Conversation]:
        """The conversations, of which some may be there already."""
        s, path = self.settings, self.work / "texts.jsonl"
        found = read_conversations(path)
        if not self._complete:
            held = sum(len(one.tokens) for one in found)
            self.progress.stage("texts", s.tokens)
            self.progress.advance(held)
            known = {one.number for one in found}
            made = (
                (one for one in given if one.number not in known)
                if given
                else self._sampled(prompts, found, held)
            )
            for size in append_conversations(path, made):
                held += size
                self.progress.advance(held)
            found = read_conversations(path)
            check_held_out(found, "more time is needed")
            self._complete = True
        return found

    def _written(self, texts: Sequence[str]) -> Iterator[Conversation]:
        encoded = (self.tokenizer(text)["input_ids"] for text in texts)
        return cut_texts(encoded, self.settings.length, self.settings.tokens)

    def _sampled(
        self, prompts: Sequence[str], found: Sequence[Conversation], held: int
    ) -> Iterator[Conversation]:
        s, ended, known = self.settings, list(found), {one.number for one in found}
        encoded = [
            self.tokenizer(prompt, add_special_tokens=False)["input_ids"][: s.length // 2]
            for prompt in prompts
        ]
        numbers = range(len(prompts)) if prompts else itertools.count()
        end = self._left(SAMPLING_SHARE)

        def stop(tokens: int) -> bool:
            if end is not None and time.monotonic() > end:
                return True
            return held + tokens >= s.tokens and holds_out_some(ended)

        # More rows than whole conversations would end before their answers begin.
        rows = min(s.rows, max(HELD_OUT, s.tokens // s.length))
        for one in converse(
            self.model, ChatFormat.of(self.model, self.tokenizer),
            numbers=(n for n in numbers if n not in known), batch_size=rows, length=s.length,
            turn_length=s.turn_length, seed=s.seed, prompts=encoded, stop=stop,
        ):  # fmt: skip
            ended.append(one)
            yield one

    def _head(self, conversations: list[Conversation]) -> Head:
        """The head as training begins."""
        s, vocab_size = self.settings, vocab_size_of(self.model)
        size = min(s.draft_vocab_size, vocab_size)
        head = KINDS[s.head].make(self.model, size, s.draft_steps, s.layer)
        size = head.config.draft_vocab_size
        head.tokens = torch.from_numpy(draft_vocabulary(conversations, size, vocab_size))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(s.seed)
            head.begin_as(self.model)
        head.borrow(self.model)
        return head.to(self.model.device)

    def _states(self, conversations: list[Conversation], head: Head) -> StoredStates:
        width = head.config.target_hidden_size * (len(head.config.layers) + 1)
        states = StoredStates(self.work / "states.bin", conversations, width)
        self.progress.stage("hidden states", int(states.starts[-1]))
        done = 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            self.progress.advance(done)

        states.fill(self.model, conversations, head.config.layers, advance)
        return states

    def _train(self, head: Head, conversations: list[Conversation], states: StoredStates) -> None:
        s, model, kind = self.settings, self.model, KINDS[self.settings.head]
        embeddings = model.get_input_embeddings()
        kinds = [is_held_out(one) for one in conversations]
        training = Texts(conversations, states, [n for n, out in enumerate(kinds) if not out])
        held_out = Texts(
            conversations, states, [n for n, out in enumerate(kinds) if out][:MEASURED]
        )
        steps = s.steps or max(1, round(s.epochs * len(training) / s.batch_size))
        recipe = Recipe(
            steps, s.batch_size, 1 if kind.single else s.draft_steps, s.learning_rate,
            s.seed,
            None if model.dtype == torch.float32 else model.dtype,
            measure_every=max(1, steps // MEASUREMENTS),
        )  # fmt: skip
        self.progress.stage("training", steps)
        end = self._left(1.0)
        train(
            head, training, held_out,
            Collator(embeddings, head.config.target_hidden_size, model.device, kind.cuts),
            model.get_output_embeddings().weight, recipe, self.work / "checkpoint.safetensors",
            self.curves, advance=lambda step, loss: self.progress.advance(step, f"loss {loss:.3f}"),
            measured=lambda _: self._write(),
            minutes=None if end is None else (end - time.monotonic()) / 60,
        )  # fmt: skip

    def _left(self, share: float) -> float | None:
        """When the clock has used up a share of the time that is left; None without a bound."""
        now = time.monotonic()
        return None if self._end is None else now + share * max(self._end - now, 0.0)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began, before = time.monotonic(), self.seconds.get(stage, 0.0)
        self._clock = (stage, began, before)
        self._write()
        try:
            yield
        finally:
            self._write()

    def _write(self) -> None:
        """Write what a later run of this folder goes on from."""
        stage, began, before = self._clock
        self.seconds[stage] = before + time.monotonic() - began
        content = {
            "settings": asdict(self.settings), "seconds": self.seconds, "complete": self._complete,
            "curves": asdict(self.curves), "origin": self._origin,
        }  # fmt: skip
        staging = self._run_file.with_suffix(".new")
        staging.write_text(json.dumps(content))
        staging.replace(self._run_file)


def check_begun(folder: Path, settings: TrainingSettings) -> None:
    """Raises ValueError for a folder that was begun with other settings."""
    file = folder / WORK / RUN
    if not file.exists():
        return
    begun, given = json.loads(file.read_text())["settings"], asdict(settings)
    other = [name for name in given if begun.get(name) != given[name]]
    if other:
        name = other[0]
        raise ValueError(
            f"{folder} was begun with {name} = {begun.get(name)}, got {given[name]}: give the same "
            "settings, or another folder"
        )


def origin_of(model: Any, prompts: Sequence[str], texts: Sequence[str]) -> dict[str, str]:
    """Digests of the target and of the data, and the target's dtype, by their names."""
    return {
        "model": _digest_of(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompts": _hash(prompts),
        "texts": _hash(texts),
    }


@torch.no_grad()
def _digest_of(model: Any) -> str:
    """Of the config, and of some numbers of each weight."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in _LEFT_OUT}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        chosen = flat[:: max(1, len(flat) // SAMPLED)].float().cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(chosen.numpy().tobytes())
    return digest.hexdigest()


def _hash(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()


def check_origin(folder: Any, begun: dict[str, str], given: dict[str, str]) -> None:
    """Raises ValueError for a folder that was begun with another model, dtype or data."""
    for name, value in given.items():
        if begun.get(name) == value:
            continue
        if name == "dtype" and name in begun:
            what = f"dtype = {begun[name]}, got {value}"
        else:
            what = f"{'another' if name == 'model' else 'other'} {name}"
        raise ValueError(f"{folder} was begun with {what}: give the same, or another folder")
