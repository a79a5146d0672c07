"""One round with a drafted tree: draft, one pass of the target over all nodes, verify, read once,
keep the accepted path."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.cache.rows import SpecCache
from specdec_hf.decode.commit import RoundDrafts, cut_and_append, read_round, record_round
from specdec_hf.decode.forward import forward_tree, forward_window
from specdec_hf.decode.session import Options, RoundRead, Session
from specdec_hf.decode.streaming import Step
from specdec_hf.drafters import TreeDraft, TreeDrafter
from specdec_hf.drafters.base import TreeOutcome
from specdec_kernels import Tree, verify_tree

# These try siblings of the same token one after the other; to the others they are one.
REPEATING_RULES = ("multi_draft", "k_seq", "traversal")


def check_tree_options(options: Options) -> None:
    """Raises ValueError for options that trees do not have."""
    if options.gamma_policy != "constant":
        raise ValueError(f"gamma_policy must be 'constant' with tree, got {options.gamma_policy!r}")
    if options.cache == "dynamic":
        raise ValueError("cache must be 'auto' or 'spec' with tree, got 'dynamic'")


@torch.inference_mode()
def tree_step(session: Session) -> list[Step]:
    """One round: what it added to each row that was still decoding."""
    s, history, clock = session, session.history, session.clock
    cache, drafter, device = s.cache, s.drafter, s.model.device
    assert isinstance(cache, SpecCache)
    assert isinstance(drafter, TreeDrafter)
    began = clock()
    draft = propose_tree(s)
    drafted_at = clock()

    # All that the cache lacks but the pending token, which is the root: the prompt, at first.
    feed = int((history.lengths - cache.lengths).max())
    if feed > 1:
        prompt = torch.from_numpy(history.last(feed)[:, :-1].copy()).to(device, non_blocking=True)
        forward_window(s.model, cache, prompt, history.lengths - feed, keep=1)
    tree = _nothing(s) if draft is None else Tree(draft.tokens, draft.parents)
    root = torch.from_numpy(history.last(1)).to(device, non_blocking=True)
    vocab_size = s.model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.cat([root, tree.tokens.clamp(0, vocab_size - 1)], dim=1)
    logits = forward_tree(s.model, cache, tokens, history.lengths - 1, tree.parents)
    verified_at = clock()

    if any(s.call.processors):
        logits = process_tree_logits(s, logits, tree)
    lengths = history.lengths.copy()
    positions = torch.from_numpy(lengths).to(device, non_blocking=True)
    size = tree.tokens.shape[1]
    verdict = verify_tree(
        logits,
        tree,
        None if draft is None else draft.law,
        rule=_rule_of(s, draft),
        draft_rows=None if draft is None else draft.draft_rows,
        **s.call.sampling.to_dict(),
        seeds=s.seeds,
        positions=positions,
        max_depth=0 if draft is None else min(draft.depth, size),
    )
    if draft is not None:
        cache.compact(positions, verdict.path)
    notes = [] if draft is None or draft.note is None else [draft.note]
    read = read_round(verdict, verdict.path, tree.tokens, tree.parents, *notes)
    s.stats.device_reads += 1
    steps, kept = cut_and_append(s, read, _observe(s, read))
    drafter.commit(lengths, None if draft is None else _outcome(read, kept))
    record_round(s, steps, size, (began, drafted_at, verified_at), feed == 1)
    return steps


def propose_tree(session: Session) -> TreeDraft | None:
    """The round's tree, no deeper than each row can use."""
    s, drafter = session, session.drafter
    if s.guard is not None and not s.guard.allows_drafting():
        return None
    assert isinstance(drafter, TreeDrafter)
    limits = np.where(s.history.active, np.minimum(drafter.depth, s.budgets - s.new - 1), 0)
    return drafter.propose(s.history, limits) if limits.max() > 0 else None


def process_tree_logits(session: Session, logits: torch.Tensor, tree: Tree) -> torch.Tensor:
    """Logits [B, N+1, V] float32 after the processors, each node with the path to it as prefix.

    Nodes below a token that cannot be accepted, absent or forbidden by a processor, are left out:
    verification never reaches them, and plain decoding would never have asked about them.
    """
    s = session
    columns = s.call.mask.shape[1]
    processors: list[Any] = s.call.processors
    processed = logits.to(torch.float32, copy=True)
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    for b in np.flatnonzero(s.history.active).tolist():
        committed = torch.from_numpy(s.sequences[b, : columns + s.new[b]].copy()).to(s.model.device)
        prefixes = {-1: committed[None]}
        processed[b, 0] = processors[b](prefixes[-1], processed[b, 0][None])[0]
        for n, (token, parent) in enumerate(zip(tokens[b], parents[b], strict=True)):
            lawful = parent in prefixes and 0 <= token < logits.shape[2]
            if not lawful or processed[b, parent + 1, token] == -torch.inf:
                continue
            prefixes[n] = torch.cat([prefixes[parent], tree.tokens[b, n].view(1, 1)], dim=1)
            processed[b, n + 1] = processors[b](prefixes[n], processed[b, n + 1][None])[0]
    return processed


def _nothing(session: Session) -> Tree:
    rows = len(session.history.lengths)
    empty = torch.empty((rows, 0), dtype=torch.int64, device=session.model.device)
    return Tree(empty, empty)


def _rule_of(session: Session, draft: TreeDraft | None) -> Any:
    """The rule; without a tree, that of a draw from the target for all that have coins."""
    plain = draft is None and session.rule not in ("greedy", "match")
    return "target_only" if plain else session.rule


def _observe(session: Session, read: RoundRead) -> RoundDrafts:
    """Count what was proposed and which children were tried on the way."""
    path, tokens, parents = read.extra[:3]
    counts = np.zeros(len(path), dtype=np.int64)
    depths, tried = counts.copy(), counts.copy()
    repeats = session.rule in REPEATING_RULES
    for b in np.flatnonzero(session.history.active).tolist():
        children, counts[b], depths[b] = _children(tokens[b].tolist(), parents[b].tolist())
        accepted = int(read.num_accepted[b])
        walked = path[b, :accepted].tolist()
        members = [-1]
        for above, node in zip([-1, *walked], [*walked, None], strict=True):
            if session.rule == "traversal":
                # Siblings of the same token stay apart, unless the row is greedy.
                members = [above if node is None else int(parents[b, node])]
            points = sorted(n for m in members for n in children.get(m, ()))
            listed = [int(tokens[b, n]) for n in points]
            if node is None:
                session.stats.rows[b].record_children(len(listed if repeats else set(listed)), None)
                tried[b] = accepted + (len(points) > 0)
                break
            token = int(tokens[b, node])
            rank = points.index(node) if repeats else list(dict.fromkeys(listed)).index(token)
            session.stats.rows[b].record_children(rank + 1, rank)
            members = [n for n in points if int(tokens[b, n]) == token]
    return RoundDrafts(counts, depths, tried)


def _children(tokens: list[int], parents: list[int]) -> tuple[dict[int, list[int]], int, int]:
    """The children of each node that is there, how many nodes that is, and the deepest."""
    depths = {-1: 0}
    children: dict[int, list[int]] = {}
    for n, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token >= 0 and parent in depths:
            depths[n] = depths[parent] + 1
            children.setdefault(parent, []).append(n)
    return children, len(depths) - 1, max(depths.values())


def _outcome(read: RoundRead, kept: NDArray[np.int64]) -> TreeOutcome:
    path, tokens = read.extra[:2]
    stood = np.arange(path.shape[1]) < kept[:, None]
    path = np.where(stood, path, -1)
    note = read.extra[3] if len(read.extra) > 3 else path[:, :0]
    chosen = np.take_along_axis(tokens, np.maximum(path, 0), axis=1)
    return TreeOutcome(path, np.where(stood, chosen, -1), note)
