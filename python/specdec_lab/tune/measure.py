"""Answers of candidates, each in turns with this library without drafts.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from specdec_hf.cli.checks import Settings
from specdec_hf.cli.load import Loaded
from specdec_hf.cli.run import generation_arguments, make_decoder
from specdec_hf.cli.speeds import GENERATE
from specdec_hf.decoder import SpeculativeDecoder
from specdec_hf.runner.model_record import record_of
from specdec_hf.schedules.costs import Measured

from specdec_lab.bench.runs import WITHOUT, Config, PromptBatch, Turns, run_turns, warm_up
from specdec_lab.tune.candidates import Candidate
from specdec_lab.tune.search import Trial


class Answers:
    """The `TrialRunner` of a model and its prompts.

    Calls remember what drafts of a class were worth in earlier calls. Each candidate has memories
    of its own, so that one of ten tokens does not decide how soon one of three drafts.

    Args:
        loaded: the target.
        drafters: by their names on the command line.
        batches: prompts, which are answered in their order, and from the first one on again.
        settings: of decoding without drafts, checked.
        advance: called with a config's name before each answer; it may raise `OutOfTimeError`.

    Attributes:
        left_out: why a candidate took no part, by its name.
    """

    def __init__(
        self,
        loaded: Loaded,
        drafters: Mapping[str, Any],
        batches: list[PromptBatch],
        settings: Settings,
        advance: Callable[[str], None],
    ) -> None:
        self.left_out: dict[str, str] = {}
        self._loaded, self._drafters, self._batches = loaded, drafters, batches
        self._arguments, self._advance = generation_arguments(settings), advance
        self._without = Config(
            WITHOUT, SpeculativeDecoder(None, compile=settings.compile), without_drafts=True
        )
        self._configs: dict[str, Config] = {}
        self._memories: dict[str, Measured] = {}
        self._answered = 0

    def compare(self, number: int) -> Turns:
        """Answers without drafts and of ``model.generate``, which warm up before the first."""
        configs, number = [Config(GENERATE), self._without], number % len(self._batches)
        if not number:
            warm_up(self._loaded, configs, self._batches, self._arguments, self._advance)
        turns = run_turns(
            self._loaded, configs, [self._batches[number]], self._arguments, 1, self._advance,
            first=number,
        )  # fmt: skip
        return turns[WITHOUT][0]

    def ready(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that the model takes; each answers a prompt when it is here for the first time.

        Drafts wait until a call has measured what they are worth, and later calls do not.
        """
        for one in candidates:
            if one.name not in self._configs and one.name not in self.left_out:
                self._make_ready(one)
        return [one for one in candidates if one.name in self._configs]

    def answer(self, trials: Sequence[Trial]) -> None:
        """Answer the next batch with all of them."""
        number = self._answered % len(self._batches)
        for trial in trials:
            name = trial.candidate.name
            configs = [self._without, self._configs[name]]
            with self._memory_of(name):
                turns = run_turns(
                    self._loaded, configs, [self._batches[number]], self._arguments, 1,
                    self._advance, first=self._answered,
                )  # fmt: skip
            trial.add(number, turns[name][0])
        self._answered += 1

    def _make_ready(self, candidate: Candidate) -> None:
        settings, name = candidate.settings, candidate.name
        drafters = [self._drafters[part] for part in settings.drafter]
        drafter = drafters if len(drafters) > 1 else drafters[0]
        decoder = make_decoder(settings, drafter, self._loaded.tokenizer)
        config = Config(name, decoder, peer=not candidate.named)
        with self._memory_of(name):
            taken, left_out = warm_up(
                self._loaded, [config], self._batches, self._arguments, self._advance,
                first_tokens=self._arguments["max_new_tokens"],
            )  # fmt: skip
        self._configs |= {one.name: one for one in taken}
        self.left_out |= left_out

    @contextmanager
    def _memory_of(self, name: str) -> Iterator[None]:
        """Calls remember the measurements of a candidate, and add to them."""
        record = record_of(self._loaded.model)
        others = record.measured
        record.measured = self._memories.setdefault(name, WeakKeyDictionary())
        try:
            yield
        finally:
            record.measured = others
