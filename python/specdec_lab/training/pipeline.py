"""The stages of training a head, each of which goes on where an interrupted run stopped."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from specdec_hf.heads.base import Head
from specdec_hf.heads.sample import Sample
from specdec_hf.heads.shipped import record_target
from specdec_hf.runner.protocol import vocab_size_of

from specdec_lab.training.conversations import (
    HELD_OUT,
    ChatFormat,
    TrainingText,
    converse,
    end_tokens,
)
from specdec_lab.training.draft_model import DraftLlama
from specdec_lab.training.kinds import KINDS
from specdec_lab.training.on_policy import OnPolicy
from specdec_lab.training.openings import opening_of
from specdec_lab.training.settings import (
    LARGEST_LEARNING_RATE,
    LOSSES,
    RUN,
    WORK,
    TrainingSettings,
)
from specdec_lab.training.states import StoredStates, width_of
from specdec_lab.training.texts import (
    append_conversations,
    check_held_out,
    check_prompts,
    cut_texts,
    draft_vocabulary,
    holds_out_some,
    is_held_out,
    read_conversations,
)
from specdec_lab.training.train import (
    FIRST_LOSS,
    Collator,
    Curves,
    Recipe,
    Texts,
    Trainer,
)

TEXTS = "texts.jsonl"
SAMPLING_SHARE = 0.5  # of the time, where it is bounded
MEASUREMENTS = 12  # on held-out texts during training
MEASURED = 48  # texts of each
UNNAMED = "loss without a name"  # of a version that averaged over the change of the loss
SAMPLED = 64  # numbers of each weight that tell models apart
# Fields of a config that change nothing in what the model computes, or are given elsewhere.
_LEFT_OUT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


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
        source: folder of another run, whose texts and states are read in the place of own ones. It
            must be of the same target and dtype, and of the same kind and layer unless this kind
            reads final states alone, which every run has.
        earlier: draft models, in the order of their training. A draft model is trained at the
            places that all of them miss.
        resume: folder of a trained head, whose weights are the first ones.

    Attributes:
        curves: what the training measured.
        seconds: time of each stage, that of interrupted runs included.

    Raises:
        ValueError: a folder that was begun with other settings, a source that does not fit, or
            settings that do not fit one another.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        folder: Path,
        settings: TrainingSettings,
        progress: Progress,
        minutes: float | None = None,
        source: Path | None = None,
        earlier: Sequence[Any] = (),
        resume: Path | None = None,
    ) -> None:
        check_settings(settings, earlier)
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.folder, self.progress = folder, progress
        self.work = folder / WORK
        self.work.mkdir(parents=True, exist_ok=True)
        self.curves, self.seconds, self._complete = Curves(), dict[str, float](), False
        self._run_file, self._origin = self.work / RUN, dict[str, str]()
        self.data = self.work if source is None else source / WORK
        self._source, self._earlier, self._resumed = source, list(earlier), resume
        check_begun(folder, settings)
        if self._run_file.exists():
            run = json.loads(self._run_file.read_text())
            self.seconds, self._complete = run["seconds"], run["complete"]
            self.curves = _read_curves(run["curves"], settings.loss)
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
        if self._source is not None:
            source = check_source(self._source, self.settings)
            for name in ("model", "dtype"):
                check_origin(self._source, {name: source[name]}, {name: origin[name]})
            origin, self._complete = source, True
        for number, model in enumerate(self._earlier, start=1):
            origin[f"draft model {number}"] = _digest_of(model)
        if self._resumed is not None:
            weights = self._resumed / KINDS[self.settings.head].weights
            if weights.exists():  # else `_head` says what is missing
                origin["resumed head"] = hashlib.sha256(weights.read_bytes()).hexdigest()
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
        kind = KINDS[self.settings.head]
        kind.save(head, self.folder)
        if kind.is_model:
            self.tokenizer.save_pretrained(self.folder)
        held_out = [one for one in conversations if is_held_out(one)]
        longest = max(held_out, key=lambda one: len(one.tokens) - one.answer)
        sample = Sample(longest.tokens, min(max(longest.answer, 2), len(longest.tokens)))
        record_target(self.folder, self.model, sample)
        return head

    def _texts(self, prompts: Sequence[str], given: Sequence[TrainingText]) -> list[TrainingText]:
        """The conversations, of which some may be there already."""
        s, path = self.settings, self.data / TEXTS
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

    def _written(self, texts: Sequence[str]) -> Iterator[TrainingText]:
        encoded = (self.tokenizer(text)["input_ids"] for text in texts)
        return cut_texts(encoded, self.settings.length, self.settings.tokens)

    def _sampled(
        self, prompts: Sequence[str], found: Sequence[TrainingText], held: int
    ) -> Iterator[TrainingText]:
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
            turn_length=s.turn_length, seed=s.seed, prompts=encoded, opening=self._opening,
            stop=stop,
        ):  # fmt: skip
            ended.append(one)
            yield one

    def _opening(self, number: int) -> list[int]:
        """The first tokens of the user's turn of a conversation."""
        words = opening_of(number, self.settings.openings, self.settings.seed)
        tokens: list[int] = self.tokenizer(words, add_special_tokens=False)["input_ids"]
        return tokens[: self.settings.turn_length]

    def _head(self, conversations: list[TrainingText]) -> Head:
        """The head as training begins."""
        s, vocab_size = self.settings, vocab_size_of(self.model)
        head = KINDS[s.head].make(self.model, s)
        size = head.config.draft_vocab_size
        head.tokens = torch.from_numpy(draft_vocabulary(conversations, size, vocab_size))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(s.seed)
            head.begin_as(self.model)
        if self._resumed is not None:
            trained = KINDS[s.head].read(self._resumed, head, self.model)
            head.load_state_dict(trained.state_dict())
            if len(trained.tokens) == size:  # it was counted on more texts than these alone
                head.tokens = trained.tokens
        head.borrow(self.model)
        return head.to(self.model.device)

    def _states(self, conversations: list[TrainingText], head: Head) -> StoredStates:
        width = head.config.target_hidden_size * (len(head.config.layers) + 1)
        path = self.data / "states.bin"
        if not path.exists():  # a run that has only its texts may be of another kind
            path = self.work / "states.bin"
        if self._source is not None and KINDS[self.settings.head].final_only:
            width = width_of(path, conversations, width)
        states = StoredStates(path, conversations, width)
        self.progress.stage("hidden states", int(states.starts[-1]))
        done = 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            self.progress.advance(done)

        states.fill(self.model, conversations, head.config.layers, advance)
        return states

    def _train(self, head: Head, conversations: list[TrainingText], states: StoredStates) -> None:
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
            measure_every=max(1, steps // MEASUREMENTS), loss=s.loss,
        )  # fmt: skip
        change = None
        if s.on_policy:
            assert isinstance(head, DraftLlama)
            ends = end_tokens(model, self.tokenizer)
            change = OnPolicy(head, model, ends, s.on_policy, s.seed)
        self.progress.stage("training", steps)
        end = self._left(1.0)
        Trainer(
            head, training, held_out,
            Collator(
                embeddings, head.config.target_hidden_size, model.device, kind.cuts,
                size=recipe.draft_steps + 1,
            ),
            model.get_output_embeddings().weight, recipe, self.work / "checkpoint.safetensors",
            self.curves, earlier=self._earlier, change=change,
            advance=lambda step, name, loss: self.progress.advance(step, f"{name} {loss:.3f}"),
            measured=lambda _: self._write(),
            minutes=None if end is None else (end - time.monotonic()) / 60,
        ).run()  # fmt: skip

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


def _read_curves(written: dict[str, Any], loss: str) -> Curves:
    """Measurements of an earlier run; one of an earlier version did not name its losses."""
    name = loss if loss == FIRST_LOSS else UNNAMED
    return Curves(**{"loss_names": [name] * len(written["losses"])} | written)


def check_settings(settings: TrainingSettings, earlier: Sequence[Any]) -> None:
    """Raises ValueError for settings that only a draft model has, and for wrong ones."""
    if settings.loss not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {settings.loss!r}")
    if not 1 <= settings.draft_steps < settings.length:
        raise ValueError(
            f"draft_steps must be at least 1 and below length, {settings.length}, got "
            f"{settings.draft_steps}"
        )
    if not 0 < settings.learning_rate <= LARGEST_LEARNING_RATE:
        raise ValueError(
            f"learning_rate must be in (0, {LARGEST_LEARNING_RATE:g}], got {settings.learning_rate}"
        )
    for name in ("on_policy", "openings"):
        if not 0 <= (share := getattr(settings, name)) <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {share}")
    if not KINDS[settings.head].is_model:
        for name, given in (("on_policy", settings.on_policy), ("earlier", len(earlier))):
            if given:
                raise ValueError(f"{name} must be 0 for {settings.head}, got {given}")


def check_source(folder: Path, settings: TrainingSettings) -> dict[str, str]:
    """What `origin_of` gave for a run whose texts another one may read, and the digest of these.

    Raises:
        ValueError: no such run, one whose texts or states are not complete or not its own, or one
            of another kind or layer whose states this kind cannot read.
    """
    file, texts = folder / WORK / RUN, folder / WORK / TEXTS
    if not file.exists():
        raise ValueError(f"{folder} must hold a run of train, and {file} does not exist")
    run = json.loads(file.read_text())
    if not run["complete"]:
        raise ValueError(f"the run of {folder} must have all its texts, and it was interrupted")
    if not texts.exists():
        raise ValueError(f"{folder} must hold texts of its own, and {texts} does not exist")
    for name in () if KINDS[settings.head].final_only else ("head", "layer"):
        theirs, ours = run["settings"].get(name), getattr(settings, name)
        if theirs != ours:
            raise ValueError(f"{folder} must hold a run with {name} = {ours}, got {theirs}")
    origin = {name: run["origin"][name] for name in ("model", "dtype", "prompts", "texts")}
    return origin | {"reused texts": hashlib.sha256(texts.read_bytes()).hexdigest()}


def check_begun(folder: Path, settings: TrainingSettings) -> None:
    """Raises ValueError for a folder that was begun with other settings."""
    file = folder / WORK / RUN
    if not file.exists():
        return
    given = asdict(settings)
    # A folder that an earlier version began has the defaults of what that version did not know.
    begun = asdict(TrainingSettings()) | json.loads(file.read_text())["settings"]
    other = [name for name in given if begun[name] != given[name]]
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
    for name in given | begun:
        if begun.get(name) == given.get(name):
            continue
        if name == "dtype" and name in begun:
            what = f"dtype = {begun[name]}, got {given[name]}"
        else:
            what = f"{'another' if 'model' in name else 'other'} {name}"
        raise ValueError(f"{folder} was begun with {what}: give the same, or another folder")
