"""The speed of a target that drafts without some of its sublayers, measured on calibration text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.runner.choose import choose_cache
from specdec_hf.runner.packed.model import pack_for_call
from specdec_hf.runner.protocol import CacheRequest
from specdec_hf.runner.structure import unknown_structure
from specdec_papers.skipped_sublayers import SkippedSublayers, sizes_of
from specdec_papers.split_model import SUBLAYERS, SplitModel, check_split

from specdec_kernels.analysis import acceptance_rate, optimal_gamma, walltime_factor
from specdec_lab.layer_skip.optimiser import Point, maximise

FIRST_LAYER = 1  # drafts share the layers before it with the target
STARTING_SHARES = (0.25, 0.4, 0.5, 0.6)  # of the sublayers that the first points leave out


@dataclass(frozen=True)
class Drafting:
    """What drafts without some sublayers are worth.

    Attributes:
        alpha: their acceptance rate: the mean probability that a draft after a prefix of the text
            is accepted.
        cost: of a draft step, as the share of the target's parameters that it reads.
        gamma: drafts of a round that give the most tokens for their cost; 0 where none pay.
        speed: tokens for the cost of one forward of the target, with as many drafts: Leviathan et
            al. 2023, Theorem 3.8. It is 1 without drafts.
    """

    alpha: float
    cost: float
    gamma: int
    speed: float

    @classmethod
    def of(cls, alpha: float, cost: float, max_draft: int) -> Drafting:
        """The best of rounds of up to ``max_draft`` drafts."""
        gamma = optimal_gamma(alpha, cost, max_draft)
        return cls(alpha, cost, gamma, walltime_factor(alpha, gamma, cost))


class Calibration:
    """Measures drafts after every prefix of some texts.

    The target reads each text once. A candidate then reads all its tokens in one forward, each of
    them over the target's own keys and values of the tokens before, which is what it sees at the
    beginning of a round. Later drafts of a round also see keys and values of earlier drafts, and
    count as being accepted as often.

    Args:
        model: the target; on the CPU it runs on packed weights.
        texts: [n] tokens each, at least 2; longer ones than the model's context do not go.
        temperature: of the texts to come; 0 compares the most likely tokens.

    Raises:
        ValueError: a model that cannot be taken apart, or that cache "spec" does not fit.
    """

    def __init__(self, model: Any, texts: Sequence[Sequence[int]], temperature: float) -> None:
        reason = unknown_structure(model)
        if reason is not None:
            raise ValueError(f"{type(model).__name__} cannot skip its layers: {reason}")
        packed_model, _ = pack_for_call(model)
        chosen = choose_cache(model, CacheRequest(1, "spec"), packed_model)
        self.model, self.temperature = chosen.model, temperature
        self._texts = [torch.tensor([text], device=model.device) for text in texts]
        self._runners: list[Any] = []
        self._expected: list[torch.Tensor] = []
        for tokens in self._texts:
            size = tokens.shape[1]
            runner = chosen.make(2 * size + 1)
            logits = runner.forward(tokens, np.zeros(1, dtype=np.int64), size)[0]
            self._runners.append(runner)
            self._expected.append(self._read(logits))

    @property
    def num_layers(self) -> int:
        """Of the target."""
        layers: int = self.model.config.get_text_config(decoder=True).num_hidden_layers
        return layers

    def split(self, skipped: SkippedSublayers) -> SplitModel:
        """The target whose first part leaves these sublayers out."""
        first = skipped.first
        return SplitModel(self.model, first, first, skipped=skipped.pairs())

    def rates(self, skipped: SkippedSublayers) -> list[float]:
        """The acceptance rate on each text."""
        split = self.split(skipped)
        found = []
        for tokens, runner, expected in zip(
            self._texts, self._runners, self._expected, strict=True
        ):
            drafted = self._read(split.first_drafts(runner, tokens)[0])
            if self.temperature == 0:
                found.append((drafted == expected).double().mean().item())
            else:
                found.append(acceptance_rate(expected, drafted, "token").mean().item())
        return found

    def _read(self, logits: torch.Tensor) -> torch.Tensor:
        """[n], the most likely tokens, or [n, V], the distributions."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        return (logits.float() / self.temperature).softmax(dim=-1)


@dataclass(frozen=True)
class LayerSearchResult:
    """What a search has found.

    Attributes:
        skipped: the sublayers to leave out; its ``search`` says how they were found.
        drafting: on the texts of the search.
        held_out: on the others.
        tried: how many sets of sublayers were measured.
    """

    skipped: SkippedSublayers
    drafting: Drafting
    held_out: Drafting
    tried: int


@torch.inference_mode()
def search_layers(
    model: Any,
    texts: Sequence[Sequence[int]],
    *,
    evaluations: int = 200,
    max_draft: int = 12,
    temperature: float = 0.0,
    seed: int = 0,
    advance: Callable[[int, Drafting], None] = lambda done, best: None,
) -> LayerSearchResult:
    """Find the sublayers of a target that drafts leave out, for the most tokens for their cost.

    Every fourth text is held out: no search reads it.

    Args:
        model: the target; it is not changed.
        texts: tokens of calibration texts, at least two.
        evaluations: how many sets of sublayers are measured.
        max_draft: most drafts of a round.
        temperature: of the texts to come; 0 is greedy.
        seed: of the search; the same gives the same result.
        advance: called with the number of sets that were measured, and the best of them.

    Raises:
        ValueError: fewer than two texts, or a model that cannot leave out sublayers, by name.
    """
    if len(texts) < 2:
        raise ValueError(f"texts must be at least 2, of which one is held out, got {len(texts)}")
    held_out = [text for n, text in enumerate(texts) if n % 4 == 1]
    calibration = Calibration(
        model, [text for n, text in enumerate(texts) if n % 4 != 1], temperature
    )
    choices = [
        (layer, name) for layer in range(FIRST_LAYER, calibration.num_layers) for name in SUBLAYERS
    ]
    if not choices:
        raise ValueError(f"{type(model).__name__} must have at least 2 layers to skip some, got 1")
    seen: dict[bytes, Drafting] = {}

    def score(point: Point) -> float:
        if not point.any():
            seen[point.tobytes()] = Drafting.of(1.0, 1.0, 0)  # the target itself
        else:
            skipped = _skipped(choices, point)
            alpha = float(np.mean(calibration.rates(skipped)))
            cost = calibration.split(skipped).first_share
            seen[point.tobytes()] = Drafting.of(alpha, cost, max_draft)
        return ranked(seen[point.tobytes()])

    def report_best(point: Point, value: float) -> None:
        advance(len(seen), max(seen.values(), key=ranked))

    tried = maximise(
        score, len(choices), evaluations, seed, _starting_points(len(choices), seed), report_best
    )
    point, _ = max((one for one in tried if one[0].any()), key=lambda one: one[1])
    drafting, skipped = seen[point.tobytes()], _skipped(choices, point)
    check_split(calibration.model, calibration.split(skipped))
    others = float(np.mean(Calibration(model, held_out, temperature).rates(skipped)))
    kept = Drafting.of(others, drafting.cost, max_draft)
    record = {
        "optimiser": "Bayesian optimisation, expected improvement", "evaluations": len(tried),
        "seed": seed, "tokens": sum(map(len, texts)), "temperature": temperature,
        "max_draft": max_draft, "drafting": asdict(drafting), "held_out": asdict(kept),
    }  # fmt: skip
    model_sizes = sizes_of(model.config)
    named = SkippedSublayers(skipped.attention, skipped.mlp, model_sizes, record)
    return LayerSearchResult(named, drafting, kept, len(tried))


def ranked(drafting: Drafting) -> float:
    """What the search maximises: the speed, and where no drafts pay, how near they come to it."""
    one = walltime_factor(drafting.alpha, 1, drafting.cost)
    return drafting.speed if drafting.gamma else min(one, 1.0)


def _skipped(choices: Sequence[tuple[int, str]], point: Point) -> SkippedSublayers:
    taken = [choices[n] for n in np.flatnonzero(point).tolist()]
    attention, mlp = (tuple(n for n, of in taken if of == name) for name in ("attention", "mlp"))
    return SkippedSublayers(attention, mlp)


def _starting_points(size: int, seed: int) -> list[NDArray[np.bool_]]:
    """Runs in the middle and random points, of several sizes."""
    generator = np.random.default_rng([seed, size])
    points = []
    for share in STARTING_SHARES:
        count = max(1, round(share * size))
        run = np.zeros(size, dtype=bool)
        begin = (size - count) // 2
        run[begin : begin + count] = True
        points += [run, np.isin(np.arange(size), generator.permutation(size)[:count])]
    return points
