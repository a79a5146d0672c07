"""Bayesian optimisation over sets of choices that are each taken or left.

A Gaussian process with the covariance ``exp(-d / l)`` models the score, d being in how many choices
two points differ. Its length l is the likeliest of a few, given the scores so far. The next point
is the one with the largest expected improvement among random points and neighbours of the best.

Source: the expected improvement of Mockus 1975; Zhang et al. 2023, "Draft & Verify", arXiv
2309.08168, whose layers are selected by Bayesian optimisation too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Point = NDArray[np.bool_]
# Share of the variance that the process leaves to what distances do not explain.
NOISE = 1e-3
LENGTHS = (0.05, 0.1, 0.2, 0.4, 0.8)  # of the covariance, by the number of choices
RANDOM, NEIGHBOURS, BEST = 200, 60, 5  # proposals of each step
_erf = np.vectorize(math.erf, otypes=[np.float64])


def maximise(
    score: Callable[[Point], float],
    size: int,
    evaluations: int,
    seed: int = 0,
    first: Sequence[Point] = (),
    advance: Callable[[Point, float], None] = lambda point, value: None,
) -> list[tuple[Point, float]]:
    """Look for the point with the largest score.

    Args:
        score: of a point [size]; finite.
        size: number of choices, at least 1.
        evaluations: how often the score is asked for, at least 1; fewer where all points are known.
        seed: of the proposals; the same gives the same points.
        first: points to begin with.
        advance: called with each point and its score.

    Returns:
        All points that were tried, each once, in their order.

    >>> tried = maximise(lambda x: float(x[0]) - x[1:].sum(), 6, 30)
    >>> max(tried, key=lambda one: one[1])[0].astype(int).tolist()
    [1, 0, 0, 0, 0, 0]
    """
    generator = np.random.default_rng(seed)
    tried: list[tuple[Point, float]] = []
    known: set[bytes] = set()
    waiting = list(first)
    for _ in range(min(evaluations, 2**size) if size < 60 else evaluations):
        waiting = [point for point in waiting if point.tobytes() not in known]
        point = waiting.pop(0) if waiting else _next(tried, known, size, generator)
        known.add(point.tobytes())
        value = float(score(point))
        tried.append((point, value))
        advance(point, value)
    return tried


def _next(
    tried: Sequence[tuple[Point, float]],
    known: set[bytes],
    size: int,
    generator: np.random.Generator,
) -> Point:
    proposals = _proposals(tried, known, size, generator)
    chosen = 0
    if tried:
        points = np.array([point for point, _ in tried])
        values = np.array([value for _, value in tried])
        mean, deviation = values.mean(), values.std() or 1.0
        scores = expected_improvement(points, (values - mean) / deviation, proposals)
        chosen = int(scores.argmax())
    point: Point = proposals[chosen]
    return point


def _proposals(
    tried: Sequence[tuple[Point, float]],
    known: set[bytes],
    size: int,
    generator: np.random.Generator,
) -> NDArray[np.bool_]:
    """[n, size], points that were not tried, at least one."""
    best = sorted(tried, key=lambda one: -one[1])[:BEST]
    found = [generator.random((RANDOM, size)) < generator.random((RANDOM, 1))]
    if best:
        found.append(best[0][0] ^ np.eye(size, dtype=bool))  # all that differ in one choice
    for point, _ in best:
        found.append(point ^ (generator.random((NEIGHBOURS, size)) < 2 / size))
    new = [point for point in np.concatenate(found) if point.tobytes() not in known]
    while not new:
        point = generator.random(size) < 0.5
        new = [point] if point.tobytes() not in known else []
    return np.array(new)


def expected_improvement(
    points: NDArray[np.bool_], values: NDArray[np.float64], proposals: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """[m], how much each proposal is expected to exceed the largest value.

    Args:
        points: [n, size], whose values are known.
        values: [n], of mean 0 and variance 1.
        proposals: [m, size].
    """
    size = points.shape[1]
    among, to = _differences(points, points), _differences(proposals, points)
    fits = [_fit(np.exp(-among / (share * size)), values) for share in LENGTHS]
    best = int(np.argmax([likelihood for likelihood, _, _ in fits]))
    _, factor, weights = fits[best]
    covariance = np.exp(-to / (LENGTHS[best] * size))
    mean = covariance @ weights
    explained = np.linalg.solve(factor, covariance.T)
    deviation = np.sqrt(np.maximum(1 - (explained**2).sum(axis=0), 1e-12))
    gain = (mean - values.max()) / deviation
    normal = np.exp(-0.5 * gain**2) / math.sqrt(2 * math.pi)
    below = 0.5 * (1 + _erf(gain / math.sqrt(2)))
    improvement: NDArray[np.float64] = deviation * (gain * below + normal)
    return improvement


def _differences(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[n, m], in how many choices the points of two lists differ."""
    counted: NDArray[np.int64] = (a[:, None] != b[None]).sum(axis=2)
    return counted


def _fit(
    covariance: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
    """The log likelihood up to a constant, the Cholesky factor, and the weights of the values."""
    factor: Any = np.linalg.cholesky(covariance + NOISE * np.eye(len(values)))
    weights: Any = np.linalg.solve(factor.T, np.linalg.solve(factor, values))
    likelihood = -0.5 * values @ weights - np.log(np.diag(factor)).sum()
    return float(likelihood), factor, weights
