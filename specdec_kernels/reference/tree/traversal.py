"""Rule traversal (arXiv 2505.12398), which decides from the leaves to the root.

On a chain it is rule block. See docs/rules.md#traversal.
"""

from __future__ import annotations

from ...arguments.status import Status
from ..chain.residual import ratio
from ..row.distribution import prob_of
from .residual import TargetResidual
from .sequence import ROOT, TreeSequence


def decide_traversal(s: TreeSequence) -> None:
    _visit(s, [], 1.0)
    s.num_accepted = len(s.path)


def _visit(s: TreeSequence, path: list[int], a: float) -> bool:
    """Whether the path or a longer one was accepted; then its tokens and one more are emitted.

    a: acceptance probability of the path's last node, before its children are tried. After each
    rejected child it is the sum of the positive parts of P' - Q divided by that of the negative
    parts, as in rule block. An invalid row ends the tree there.
    """
    node = path[-1] if path else ROOT
    row = s.target(node)
    residual, status, any_rejected = TargetResidual(a * row.probs), 0, False
    is_end = s.ends(path)
    is_leaf = is_end or not row.valid or len(path) >= s.a.max_depth
    for n in [] if is_leaf else s.children[node]:
        draft = s.draft(n)
        if not draft.valid_at_token:
            status = Status.DRAFT_INVALID
            break
        p = prob_of(residual.weights, s.tokens[n]) / residual.mass
        if _visit(s, [*path, n], min(1.0, ratio(p, draft.token_prob))):
            return True
        if not draft.valid:
            status = Status.DRAFT_INVALID
            break
        after = residual.minus(draft, residual.mass, [])
        positive = float(after.weights.sum())
        negative = float((residual.mass * draft.probs - residual.weights).clamp(min=0).sum())
        negative += residual.mass * draft.mass_beyond
        if not negative > 0:
            status = Status.EMPTY_RESIDUAL
            break
        a, any_rejected = min(1.0, positive / negative), True
        residual = after
        residual.mass = negative
    if path:
        s.accept_probs[node] = a
        # The uniform belongs to the round, as in rule block.
        if s.acceptance_uniform(node, s.position, node) >= a:
            return False
    _accept_path(s, path)
    if is_end:
        return True
    if not row.valid:
        s.status |= s.target_fault(node + 1)
        return True
    s.status |= status
    weights = residual.weights if any_rejected else row.probs
    if not float(weights.sum()) > 0:
        s.status |= Status.EMPTY_RESIDUAL
        weights = row.probs
    s.emit(row, s.draw_at(len(path), weights))
    return True


def _accept_path(s: TreeSequence, path: list[int]) -> None:
    s.path = path
    for parent, n in zip([ROOT, *path], path, strict=False):
        s.emit(s.target(parent), s.tokens[n])
