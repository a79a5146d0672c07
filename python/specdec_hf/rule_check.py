"""An enumeration of a rule of the user's own: whether what it emits has the target's distribution.

Terms:

- case: tables of a toy target and a toy drafter over two or three tokens, and a shape of drafts.
- cell: a box of uniforms in which a rule answers the same. A rule that compares uniforms with
  numbers has few. Their edges are found by bisection on the rule itself, so that a wrong acceptance
  probability shows as a cell of wrong width.
- distance: the total variation distance between what the rule emits, weighted by the volume of the
  cells and the probability of the drafts, and the target's own distribution.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import check_flag, check_integer, check_number, shown
from specdec_hf.extras.own_rule import OwnRule, ask_rule
from specdec_hf.rules import check_takes, name_of

Floats = NDArray[np.float64]
Answer = tuple[tuple[int, ...], Floats]  # the accepted nodes, and `next`

MOST_CELLS = 64  # of one draft
NEAR_ENDS = (0.001, 0.999)
EDGE = 2.0**-40  # how well the edge of a cell is known
SAME = 1e-9  # entries of `next` that differ less are equal


@dataclass(frozen=True)
class RuleFinding:
    """The result of one case.

    Attributes:
        name: of the case.
        passed: whether the distance is within the tolerance.
        distance: between the distributions; the largest of all drafts where these are
            deterministic. NaN where there is a fault.
        mean_accepted: expected number of accepted drafts, of how many.
        drafts: number of drafts that were tried.
        cells: number of cells of their uniforms.
        fault: why the rule could not be enumerated, or "".
    """

    name: str
    passed: bool
    distance: float = float("nan")
    mean_accepted: float = 0.0
    drafts: int = 0
    cells: int = 0
    fault: str = ""


@dataclass
class RuleCheck:
    """The result of `check_rule`; printing it gives a table.

    Attributes:
        rule: its name.
        places: at how many places each cell was tried.
        findings: a `RuleFinding` for each case.
    """

    rule: str
    places: int
    findings: list[RuleFinding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every case passed."""
        return all(finding.passed for finding in self.findings)

    def __str__(self) -> str:
        width = max(len(finding.name) for finding in self.findings)
        lines = [self.rule]
        for one in self.findings:
            found = f"{one.drafts:3} drafts {one.cells:4} cells  {one.mean_accepted:.3f} accepted"
            found += f"  distance {one.distance:<8.2g}"
            verdict = "passed" if one.passed else "FAILED"
            lines.append(f"{one.name:{width}}  {one.fault or found}  {verdict}")
        limit = f"each cell was tried at {self.places} places: what changes in less than "
        return "\n".join([*lines, f"{limit}{2 / self.places:.1%} of one may be missed"])


@dataclass(frozen=True)
class _Case:
    """A case; its tables are indexed by the tokens before.

    Attributes:
        parents: of the nodes of the draft.
        target: P after each path of up to as many tokens as the draft is deep.
        draft: Q, or None for deterministic drafts, each of which is enumerated by itself.
    """

    name: str
    vocab_size: int
    parents: tuple[int, ...]
    target: dict[tuple[int, ...], Floats]
    draft: dict[tuple[int, ...], Floats] | None


def check_rule(
    rule: OwnRule,
    *,
    trees: bool = False,
    places: int = 128,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> RuleCheck:
    """Enumerate what a rule of your own emits, and compare it with the target's distribution.

    The rule is asked about every draft of toy models over two or three tokens: sampled drafts,
    filtered ones, those of the target itself, deterministic ones, and greedy calls. For each draft
    the cells of its uniforms are found by bisection, so the distances are exact but for rounding.

    A box of uniforms counts as one cell if the rule answers the same at all ``places`` in it. They
    are spread evenly over each uniform, so that answers which hang on one uniform are found unless
    they do so in less than 2 / places of the box, and answers which hang on several with a
    probability that grows with their volume. What is missed may be wrong by as much as its volume.
    Not tested are larger vocabularies and longer drafts, which may round otherwise, and rules that
    keep a state. One that answers otherwise when it is asked again fails, where it does so at the
    first place of a cell.

    Args:
        rule: as in `generate`; see docs/rules.md#a-rule-of-your-own.
        trees: whether its drafts are trees.
        places: of each box, at least 8. Three times as many take three times as long.
        tolerance: largest distance that passes, in (0, 1]. That of a rule that computes in float32
            is about 1e-7.
        seed: of the tables and the places.

    Returns:
        A `RuleCheck`, which prints as a table. A rule whose answers break its contract or raise
        fails, with the reason.

    Raises:
        TypeError, ValueError: an argument of a wrong type or out of range, by name.

    >>> from specdec_hf import check_rule  # doctest: +SKIP
    >>> print(check_rule(my_rule))  # doctest: +SKIP
    """
    if not callable(rule):
        raise TypeError(f"rule must be a function, got {shown(rule)}")
    check_flag("trees", trees)
    check_takes(rule, trees=trees)
    check_integer("places", places, 8)
    tolerance = check_number("tolerance", tolerance, 0, 1)
    generator = np.random.default_rng(check_integer("seed", seed, 0))
    check = RuleCheck(name_of(rule), places)
    for case in list(_cases(generator, trees)):  # those of a seed are the same for every rule
        check.findings.append(_enumerate(rule, case, trees, places, tolerance, generator))
    return check


def _cases(generator: np.random.Generator, trees: bool) -> Iterator[_Case]:
    two = (-1, -1, 0) if trees else (-1, 0)
    wide = (-1, -1, 0, 1) if trees else (-1, 0, 1)

    def table(size: int, depth: int, removed: int = 0) -> dict[tuple[int, ...], Floats]:
        made = {}
        for n in range(depth + 1):
            for path in itertools.product(range(size), repeat=n):
                weights = generator.integers(1, 8, size).astype(np.float64)
                weights[generator.permutation(size)[:removed]] = 0.0
                made[path] = weights / weights.sum()
        return made

    deep, deeper = max(_depths(two)), max(_depths(wide))
    small = table(2, deeper)
    yield _Case("sampled drafts", 3, two, table(3, deep), table(3, deep))
    yield _Case("more sampled drafts", 2, wide, small, table(2, deeper))
    yield _Case("filtered, sampled drafts", 3, two, table(3, deep, 1), table(3, deep, 1))
    yield _Case("drafts of the target itself", 2, two, small, small)
    yield _Case("deterministic drafts", 3, two, table(3, deep), None)
    yield _Case("greedy, deterministic drafts", 3, two, table(3, deep, 2), None)


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _paths(case: _Case, tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens down to the root, which comes first, and to each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, case.parents, strict=True):
        paths.append((*paths[parent + 1], token))
    return paths


def _enumerate(
    rule: OwnRule, case: _Case, trees: bool, places: int, tolerance: float,
    generator: np.random.Generator,
) -> RuleFinding:  # fmt: skip
    depth = max(_depths(case.parents)) + 1
    wanted = _tail(case, (), depth)
    emitted, distance, accepted, drafts, cells = np.zeros_like(wanted), 0.0, 0.0, 0, 0
    for tokens in itertools.product(range(case.vocab_size), repeat=len(case.parents)):
        weight = _weight(case, tokens)
        if weight == 0:
            continue
        try:
            found = cells_of(_asker(rule, case, tokens, trees), len(tokens) + 1, places, generator)
        except (TypeError, ValueError, RuntimeError) as error:  # of the answer, or of the rule
            return RuleFinding(case.name, False, drafts=drafts, cells=cells, fault=str(error))
        mine = np.zeros_like(wanted)
        for volume, (nodes, following) in found:
            prefix = tuple(tokens[node] for node in nodes)
            accepted += weight * volume * len(nodes)
            for token in range(case.vocab_size):
                rest = _tail(case, (*prefix, token), depth)
                mine[(*prefix, token)] += volume * following[token] * rest
        emitted += weight * mine
        drafts, cells = drafts + 1, cells + len(found)
        if case.draft is None:
            distance = max(distance, float(abs(mine - wanted).sum()) / 2)
    if case.draft is None:
        accepted /= drafts
    else:
        distance = float(abs(emitted - wanted).sum()) / 2
    return RuleFinding(case.name, distance <= tolerance, distance, accepted, drafts, cells)


def _tail(case: _Case, prefix: tuple[int, ...], depth: int) -> Floats:
    """[V] * (depth - len(prefix)), the target's distribution of the tokens after a prefix."""
    if len(prefix) == depth:
        return np.ones(())
    following = case.target[prefix]
    return np.stack(
        [p * _tail(case, (*prefix, v), depth) for v, p in enumerate(following.tolist())]
    )


def _weight(case: _Case, tokens: Sequence[int]) -> float:
    """The probability of a draft; 1 of a deterministic one, whose siblings differ."""
    paths = _paths(case, tokens)
    if case.draft is None:
        return float(len(set(paths)) == len(paths))
    above = (paths[parent + 1] for parent in case.parents)
    return float(np.prod([case.draft[path][t] for path, t in zip(above, tokens, strict=True)]))


def _asker(
    rule: OwnRule, case: _Case, tokens: Sequence[int], trees: bool
) -> Callable[[Floats], Answer]:
    """The answer of a rule about a draft, as a function of the uniforms.

    It raises as `ask_rule` does.
    """
    paths = _paths(case, tokens)
    target = torch.from_numpy(np.stack([case.target[path] for path in paths]))
    draft = None
    if case.draft is not None:
        draft = torch.from_numpy(np.stack([case.draft[paths[n + 1]] for n in case.parents]))
    ids = torch.tensor(tokens)
    parents = torch.tensor(case.parents) if trees else None

    def answer(uniforms: Floats) -> Answer:
        decision = ask_rule(
            rule, target.clone(), None if draft is None else draft.clone(), ids.clone(),
            torch.from_numpy(uniforms.copy()), None if parents is None else parents.clone(),
        )  # fmt: skip
        return tuple(decision.path), decision.following.double().numpy().copy()

    return answer


def _same(one: Answer, other: Answer) -> bool:
    return one[0] == other[0] and bool((abs(one[1] - other[1]) <= SAME).all())


def cells_of(
    answer: Callable[[Floats], Answer], size: int, places: int, generator: np.random.Generator
) -> list[tuple[float, Answer]]:
    """The volume and the answer of each cell of ``size`` uniforms.

    Raises:
        ValueError: there are too many, or the answer to the same uniforms is another one.
    """
    boxes = [(np.zeros(size), np.ones(size))]
    cells: list[tuple[float, Answer]] = []
    while boxes:
        low, high = boxes.pop()
        points = low + (high - low) * _places(size, places, generator)
        first = answer(points[0])
        if not _same(answer(points[0]), first):
            raise ValueError("it answers otherwise when it is asked again")
        unlike = next((point for point in points[1:] if not _same(answer(point), first)), None)
        if unlike is None:
            cells.append((float((high - low).prod()), first))
            continue
        if len(cells) + len(boxes) >= MOST_CELLS:
            raise ValueError(
                f"its answers have more than {MOST_CELLS} cells of the uniforms of one draft, as "
                "where they change with a uniform and not only where it passes an edge"
            )
        axis, edge = _edge(answer, points[0], unlike)
        below, above = high.copy(), low.copy()
        below[axis] = above[axis] = edge
        boxes += [(low, below), (above, high)]
    return cells


def _places(size: int, places: int, generator: np.random.Generator) -> Floats:
    """[n, size], places in a cube: a Latin hypercube, and the ends of each axis."""
    intervals = generator.permuted(np.tile(np.arange(places), (size, 1)), axis=1).T
    spread = (intervals + generator.random((places, size))) / places
    ends = generator.random((2 * size, size))
    for axis in range(size):
        ends[2 * axis : 2 * axis + 2, axis] = NEAR_ENDS
    return np.concatenate([ends, spread])


def _edge(answer: Callable[[Floats], Answer], start: Floats, end: Floats) -> tuple[int, float]:
    """A uniform, and where the answer changes with it on the way from one place to another."""
    here, found = start.copy(), answer(start)
    for axis in range(len(start)):
        there = here.copy()
        there[axis] = end[axis]
        if not _same(answer(there), found):
            break
        here = there
    low, high = sorted((here[axis], there[axis]))
    here[axis] = low
    found = answer(here)
    while high - low > EDGE:
        here[axis] = (low + high) / 2
        if _same(answer(here), found):
            low = here[axis]
        else:
            high = here[axis]
    return axis, float(high)
