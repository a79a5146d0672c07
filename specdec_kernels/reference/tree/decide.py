"""Which path of a tree is accepted, by the rules that go from the root down."""

from __future__ import annotations

from ...arguments.status import Status
from ..row.distribution import TargetRow, prob_of
from .k_seq import decide_k_seq
from .residual import LEAST_MASS, TargetResidual, mass_without
from .sequence import ROOT, TreeSequence
from .traversal import decide_traversal


def decide(s: TreeSequence) -> None:
    if s.max_new_tokens == 0:
        return
    if s.a.rule_name == "traversal" and s.params.temperature != 0:
        decide_traversal(s)
    else:
        _descend(s)


def _descend(s: TreeSequence) -> None:
    """Accepts one child after the other, up to a node none of whose children is accepted."""
    node, same_text = ROOT, [ROOT]
    while not s.ends(s.path):
        row = s.target(node)
        if not row.valid:
            s.status |= s.target_fault(node + 1)
            return
        depth = len(s.path)
        children: list[int] = []
        if depth < s.a.max_depth:
            children = sorted(n for m in same_text for n in s.children[m])
        child, token = _decide_children(s, depth, row, children)
        if child is None:
            s.emit(row, token)
            return
        s.emit(row, s.tokens[child])
        s.path.append(child)
        s.num_accepted += 1
        # Siblings of one token continue the same text: the children of all of them come next.
        same_text = [n for n in children if s.tokens[n] == s.tokens[child]]
        node = child


def _decide_children(
    s: TreeSequence, depth: int, row: TargetRow, children: list[int]
) -> tuple[int | None, int]:
    """(the accepted child, or None; the token to emit if there is none)."""
    rule = s.a.rule_name
    first = {s.tokens[n]: n for n in reversed(children)}  # the first child of each token
    distinct = sorted(first.values())
    if s.params.temperature == 0 or rule in ("greedy", "match", "target_only"):
        return _decide_by_target_token(s, depth, row, first)
    if rule == "typical":
        return _decide_typical(s, depth, row, distinct)
    if rule == "top_k_plus_one":
        return _decide_top_k_plus_one(s, depth, row, children, first)
    if rule == "k_seq":
        return decide_k_seq(s, depth, row, children)
    replacement = rule == "multi_draft"
    if not replacement:
        once = {(s.drawn_together(n), s.tokens[n]): n for n in reversed(children)}
        children = sorted(once.values())
    return _decide_one_by_one(s, depth, row, children, replacement)


def _decide_by_target_token(
    s: TreeSequence, depth: int, row: TargetRow, first: dict[int, int]
) -> tuple[int | None, int]:
    """Accepts the child with the token that the target decides on, which target_only draws."""
    drawn = s.params.temperature != 0 and s.a.rule_name == "target_only"
    wanted = s.draw_at(depth, row.probs) if drawn else s.target_token(depth, row)
    for token, n in first.items():
        s.accept_probs[n] = float(row.probs[token]) if drawn else float(token == wanted)
    return first.get(wanted), wanted


def _decide_typical(
    s: TreeSequence, depth: int, row: TargetRow, children: list[int]
) -> tuple[int | None, int]:
    """Accepts the most likely child above the bound."""
    bound = s.typical_bound(row)
    for n in children:
        s.accept_probs[n] = float(float(row.probs[s.tokens[n]]) > bound)
    typical = [n for n in children if s.accept_probs[n]]
    if not typical:
        return None, s.draw_at(depth, row.probs)
    return max(typical, key=lambda n: float(row.probs[s.tokens[n]])), -1


def _decide_one_by_one(
    s: TreeSequence, depth: int, row: TargetRow, children: list[int], replacement: bool
) -> tuple[int | None, int]:
    """Rules multi_draft and multi_draft_wor: tries each child against the residual so far.

    Without replacement, Q of a later sibling lacks the tokens that were tried from the same row
    before. A token that was rejected before from another row cannot be accepted, yet its Q is
    subtracted all the same.
    """
    residual = TargetResidual(row.probs)
    tried: dict[tuple[int, int], dict[int, float]] = {}  # without replacement: token -> Q by row
    for trial, n in enumerate(children):
        token, draft = s.tokens[n], s.draft(n)
        before = {} if replacement else tried.setdefault(s.drawn_together(n), {})
        rest = mass_without(draft, before)
        if not draft.valid_at_token:
            s.status |= Status.DRAFT_INVALID
            break
        if not rest > LEAST_MASS:  # Q holds no other token that could have been drawn
            continue
        p, q = prob_of(residual.weights, token), residual.mass * draft.token_prob / rest
        if s.accept(n, p, q, s.position + depth, trial):
            return n, -1
        if not draft.valid:
            s.status |= Status.DRAFT_INVALID
            break
        residual = residual.minus(draft, residual.mass / rest, before)
        if not replacement:
            before[token] = draft.token_prob
            if token < s.v:
                residual.weights[token] = 0.0
        residual.mass = float(residual.weights.sum())
        if not residual.mass > 0:
            s.status |= Status.EMPTY_RESIDUAL
            residual = TargetResidual(row.probs)
            break
    return None, s.draw_at(depth, residual.weights)


def _decide_top_k_plus_one(
    s: TreeSequence, depth: int, row: TargetRow, children: list[int], first: dict[int, int]
) -> tuple[int | None, int]:
    """The last child was drawn from Q without the others, which are the likeliest tokens of Q."""
    weights = row.probs
    top = {s.tokens[n] for n in children[:-1]}
    if children and s.tokens[children[-1]] not in top:
        n = children[-1]
        draft = s.draft(n)
        rest = mass_without(draft, {t: s.draft(n, token=t).token_prob for t in top})
        if not draft.valid:
            s.status |= Status.DRAFT_INVALID
        elif rest > LEAST_MASS:
            p, q = prob_of(row.probs, s.tokens[n]), draft.token_prob / rest
            if s.accept(n, p, q, s.position + depth, 0):
                return n, -1
            weights = TargetResidual(row.probs).minus(draft, 1 / rest, top).weights
            if not float(weights.sum()) > 0:
                s.status |= Status.EMPTY_RESIDUAL
                weights = row.probs
    total = float(weights.sum())
    for token in top:
        s.accept_probs[first[token]] = float(weights[token]) / total if token < s.v else 0.0
    drawn = s.draw_at(depth, weights)
    return (first[drawn] if drawn in top else None), drawn
