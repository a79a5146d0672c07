"""A statistical test of a drafter: whether the text stays the target's with it.

Terms:

- PIT value of a token in its distribution (randomised probability integral transform): the
  probability of all more likely tokens, plus a uniform share of its own. Where tokens are drawn
  from that distribution, their PIT values are independent and uniform in [0, 1), whatever the
  distributions are, so that those of many contexts can be tested together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from specdec_hf.api import generate
from specdec_hf.arguments import check_integer
from specdec_hf.drafters.resolve import resolve_drafter
from specdec_hf.drafting.call import DrafterCall, reads_draft
from specdec_hf.drafting.checks import read_chain
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Draft, Drafter, State, drafts_trees, rules_of
from specdec_hf.request.inputs import check_language_model
from specdec_hf.runner.protocol import vocab_size_of
from specdec_hf.trees import as_layout

BINS = 20
SIGNIFICANCE = 1e-4  # of each test
TEMPERATURES = (1.0, 0.5)
SEQUENCES_AT_ONCE = 128


@dataclass(frozen=True)
class Finding:
    """The result of one test.

    Attributes:
        name: what was tested.
        passed: whether it was as it must be.
        p_value: probability of a deviation as large as the one that was found, or None.
        count: tokens that were tested.
    """

    name: str
    passed: bool
    p_value: float | None = None
    count: int = 0


@dataclass
class DrafterCheck:
    """The result of `check_drafter`; printing it gives a table.

    Attributes:
        drafter: its name.
        findings: a `Finding` for each test.
        notes: what the loop remarked about the drafts.
    """

    drafter: str
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every test passed."""
        return all(finding.passed for finding in self.findings)

    def __str__(self) -> str:
        width = max(len(finding.name) for finding in self.findings)
        lines = [self.drafter]
        for one in self.findings:
            p_value = "" if one.p_value is None else f"p = {one.p_value:.2g}"
            verdict = "passed" if one.passed else "FAILED"
            lines.append(f"{one.name:{width}}  {one.count:6} tokens  {p_value:12}  {verdict}")
        return "\n".join([*lines, *self.notes])


def check_drafter(
    drafter: Any,
    model: Any,
    input_ids: torch.Tensor | None = None,
    *,
    tree: Any = None,
    num_assistant_tokens: int | None = None,
    rules: Sequence[str] | None = None,
    samples: int = 512,
    max_new_tokens: int = 5,
    seed: int = 0,
) -> DrafterCheck:
    """Test that the text stays the target's with a drafter.

    Three things are tested: greedy text equals plain decoding; sampled text follows the target's
    distribution under each lossless rule of the drafter, at two temperatures; and the drafts of a
    chain drafter follow the distributions that it reports with them. A fault is found if it is
    large enough for the number of samples. Not tested are limits, counts, confidence, the
    distributions of a tree drafter, and whether a sequence's drafts depend on the rest of its
    batch.

    Args:
        drafter, tree, num_assistant_tokens: as in `generate`.
        model: the target, whose logits decide; a small one in float32 tests most.
        input_ids: [1, T] int64, the prompt; None takes one that repeats itself, so that drafters
            that copy have something to draft.
        rules: acceptance rules to test; None tests all that the drafter offers.
        samples: texts for each rule and temperature.
        max_new_tokens: tokens of each text.
        seed: of the texts.

    Returns:
        A `DrafterCheck`, which prints as a table.

    Raises:
        TypeError, ValueError: an argument that `generate` refuses, no drafter, or a number of
            samples or tokens below 1.

    >>> from specdec_hf import check_drafter  # doctest: +SKIP
    >>> print(check_drafter(MyDrafter(), model))  # doctest: +SKIP
    """
    check_language_model("model", model)
    check_integer("samples", samples, 1)
    check_integer("max_new_tokens", max_new_tokens, 1)
    check_integer("seed", seed)
    resolved = resolve_drafter(drafter, as_layout(tree), model)
    if resolved is None:
        raise ValueError("drafter must be given, got None")
    model = _without_processors(model)
    prompt = _prompt(model) if input_ids is None else input_ids
    options: dict[str, Any] = {"tree": tree, "num_assistant_tokens": num_assistant_tokens}
    options |= {"guard": False, "max_new_tokens": max_new_tokens}
    check = DrafterCheck(resolved.name, [_check_greedy(drafter, model, prompt, options)])
    for rule in rules_of(resolved) if rules is None else rules:
        for temperature in TEMPERATURES if rule != "greedy" else ():
            run = _Run(drafter, resolved, model, prompt, options, rule, temperature)
            run.generate(samples, seed)
            check.findings += run.findings()
            check.notes += [note for note in run.notes if note not in check.notes]
    return check


def _without_processors(model: Any) -> Any:
    """The same model without penalties in its generation config: raw logits are compared."""
    own = model.generation_config
    model = copy.copy(model)
    model.generation_config = GenerationConfig(
        eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id, bos_token_id=own.bos_token_id
    )
    return model


def _prompt(model: Any) -> torch.Tensor:
    vocab_size = vocab_size_of(model)
    phrase = torch.arange(1, 8) * 31 % vocab_size
    return torch.cat([phrase, phrase, phrase[:3]])[None].to(model.device)


def _check_greedy(
    drafter: Any, model: Any, prompt: torch.Tensor, options: dict[str, Any]
) -> Finding:
    greedy: dict[str, Any] = {"input_ids": prompt, "do_sample": False, "max_new_tokens": 32}
    plain = generate(model, **greedy, drafter=None)
    drafted = generate(model, **{**options, **greedy}, drafter=drafter)
    return Finding(
        "greedy text equals plain decoding",
        torch.equal(plain, drafted),
        count=plain.shape[1] - prompt.shape[1],
    )


class _Run:
    """Texts under one rule and temperature, and the PIT values of their tokens and drafts."""

    def __init__(
        self, drafter: Any, resolved: Drafter, model: Any, prompt: torch.Tensor,
        options: dict[str, Any], rule: str, temperature: float,
    ) -> None:  # fmt: skip
        self.model, self.prompt, self.rule, self.temperature = model, prompt, rule, temperature
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        self.options = {**options, **sampling, "rule": rule}
        self.trees = drafts_trees(resolved)
        self.drafter = drafter if self.trees else resolved
        self.drafts: list[NDArray[np.float64]] = []
        self.notes: list[str] = []
        self.text = np.empty(0)
        self._random = np.random.default_rng(0)

    def generate(self, samples: int, seed: int) -> None:
        """Generate the texts."""
        recorded = not self.trees and reads_draft(self.rule)
        drafter = _recorded(self.drafter, self.record) if recorded else self.drafter
        self._generate(drafter, samples, seed)

    def findings(self) -> list[Finding]:
        """The tests of the texts, and of the drafts where those were recorded."""
        where = f"rule {self.rule}, temperature {self.temperature}"
        drafts = [_finding(f"drafts, {where}", np.concatenate(self.drafts))] if self.drafts else []
        return [_finding(f"text, {where}", self.text), *drafts]

    def _generate(self, drafter: Any, samples: int, seed: int) -> None:
        pit_values = []
        for first in range(0, samples, SEQUENCES_AT_ONCE):
            count = min(SEQUENCES_AT_ONCE, samples - first)
            prompts = self.prompt.expand(count, -1)
            out = generate(
                self.model,
                prompts,
                attention_mask=torch.ones_like(prompts),
                drafter=drafter,
                seed=[seed * samples + first + n for n in range(count)],
                return_dict_in_generate=True,
                **self.options,
            )
            self.notes += [note for note in out.stats.notes if "drafter" in note]
            with torch.inference_mode():
                logits = self.model(out.sequences).logits[:, prompts.shape[1] - 1 : -1]
            rows = torch.softmax(logits.double() / self.temperature, dim=-1)
            new = slice(prompts.shape[1], None)
            found = self.pit_values(rows, out.sequences[:, new])
            pit_values.append(found[out.attention_mask[:, new].bool().cpu()])
        self.text = np.concatenate(pit_values)

    def pit_values(self, rows: torch.Tensor, tokens: torch.Tensor) -> NDArray[np.float64]:
        """[B, m], the PIT values of tokens [B, m] in the distributions [B, m, V]."""
        own = rows.gather(-1, tokens[..., None])
        above = rows.masked_fill(rows <= own, 0.0).sum(dim=-1)
        # Tokens of equal probability are one after the other in the order of their ids.
        ids = torch.arange(rows.shape[-1], device=rows.device)
        before = ((rows == own) & (ids < tokens[..., None])).sum(dim=-1) * own[..., 0]
        uniform = torch.from_numpy(self._random.random(tuple(tokens.shape))).to(rows.device)
        found: NDArray[np.float64] = (above + before + uniform * own[..., 0]).cpu().numpy()
        return found

    def record(self, draft: Draft, active: NDArray[np.bool_]) -> None:
        """Keep the PIT values of a round's drafts in the distributions reported with them."""
        drawn = draft.drawn
        assert drawn is not None
        assert draft.counts is not None
        survive = drawn.logits >= drawn.threshold[..., None]
        scaled = drawn.logits.double() / self.temperature
        rows = (scaled - drawn.logsumexp[..., None]).exp().masked_fill(~survive, 0.0)
        tokens = draft.tokens.to(rows.device)
        counted = np.arange(tokens.shape[1]) < draft.counts[:, None]
        self.drafts.append(self.pit_values(rows, tokens.clamp(min=0))[counted & active[:, None]])


def _recorded(drafter: Drafter, record: Callable[[Draft, NDArray[np.bool_]], None]) -> Drafter:
    """A drafter whose drafts, as the loop reads them, ``record`` gets too."""
    recording = copy.copy(drafter)

    def begin(call: DrafterCall) -> State:
        state = copy.copy(drafter.begin(call))  # some drafters are their own states
        propose, silent = state.propose, replace(call, note=lambda text: None)

        def recorded(texts: History, limits: NDArray[np.int64]) -> Any:
            proposed = propose(texts, limits)
            if isinstance(proposed, Draft) and proposed.drawn is not None:
                draft = read_chain(drafter, proposed, texts, int(limits.max()), silent)
                if draft is not None:  # the loop notes the same faults
                    record(draft, texts.active)
            return proposed

        state.propose = recorded  # type: ignore[method-assign]
        return state

    recording.begin = begin  # type: ignore[method-assign]
    return recording


def _finding(name: str, pit_values: NDArray[np.float64]) -> Finding:
    """Pearson's chi-square test of PIT values against uniform ones."""
    found, _ = np.histogram(pit_values.clip(0, 1), bins=BINS, range=(0, 1))
    expected = len(pit_values) / BINS
    statistic = float(((found - expected) ** 2 / expected).sum()) if len(pit_values) else 0.0
    half = torch.tensor([(BINS - 1) / 2, statistic / 2], dtype=torch.float64)
    p_value = float(torch.special.gammaincc(half[0], half[1]))
    return Finding(name, p_value >= SIGNIFICANCE, p_value, len(pit_values))
