"""Verification by a rule of the user's own, or without a part of the rule.

docs/rules.md#a-rule-of-your-own says what such a rule is asked.

It is slow: the rule is asked about one sequence at a time, and the host reads what it answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer, check_integers, shown
from specdec_hf.rules import name_of
from specdec_hf.runner.protocol import to_device
from specdec_kernels import (
    Sampled,
    SampledDraft,
    Status,
    Tree,
    TreeVerdict,
    Verdict,
    sample,
    verify_chain,
)
from specdec_kernels.analysis.uniforms import acceptance_uniforms

OwnRule = Callable[..., Any]
SUM_TOLERANCE = 1e-4  # how far the sum of `next` may be from 1


class Decision(NamedTuple):
    """The answer of a rule about one sequence: the accepted nodes, and `next` [V]."""

    path: list[int]
    following: torch.Tensor


def ask_rule(
    rule: OwnRule,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    tokens: torch.Tensor,
    uniforms: torch.Tensor,
    parents: torch.Tensor | None = None,
    where: str = "",
) -> Decision:
    """Ask a rule about the drafts of one sequence, and check its answer.

    Args:
        rule: of the user.
        target_probs: [N+1, V] float64.
        draft_probs: [N, V] float64, None for deterministic drafts.
        tokens: [N] int64.
        uniforms: [N+1] float64.
        parents: [N] int64 of a tree, None for a chain.
        where: ends the messages.

    Raises:
        TypeError, ValueError: an answer that is none, by what is wrong with it.
        RuntimeError: the rule raised an exception.
    """
    name, device = name_of(rule), target_probs.device
    above = None if parents is None else parents.tolist()
    given = (target_probs, draft_probs, tokens, uniforms)
    try:
        answer = rule(*given) if parents is None else rule(*given, parents)
    except Exception as error:  # whatever a user's function raises
        text = f"{name} raised {type(error).__name__}{where}: {shown(str(error))}"
        raise RuntimeError(text) from error
    first = "accepted" if parents is None else "path"
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise TypeError(f"{name} must return ({first}, next), got {shown(answer)}{where}")
    accepted, following = answer
    _check_next(name, following, target_probs.shape[-1], device, where)
    size = len(tokens)
    if isinstance(accepted, torch.Tensor):
        accepted = accepted.tolist()
    label = f"{first} of {name}{where}"
    if above is None:
        return Decision(list(range(check_integer(label, accepted, 0, size))), following)
    path = list(check_integers(label, accepted, 0, size - 1))
    for node, parent in zip(path, [-1, *path], strict=False):
        if above[node] != parent:
            raise ValueError(
                f"{label} must go from child to child, from one of the root, got {path}: the "
                f"parent of node {node} is {above[node]}"
            )
    return Decision(path, following)


def _check_next(name: str, value: Any, size: int, device: torch.device, where: str) -> None:
    rule = f"{name} must return next as float32 or float64 [{size}] on {device}"
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{rule}, got {shown(value)}{where}")
    if value.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{rule}, got {value.dtype}{where}")
    if value.shape != (size,) or value.device != device:
        raise ValueError(f"{rule}, got {list(value.shape)} on {value.device}{where}")
    lowest, total = value.min().item(), value.sum(dtype=torch.float64).item()
    if not (lowest >= 0 and abs(total - 1) <= SUM_TOLERANCE):  # a NaN fails both comparisons
        raise ValueError(
            f"{name} must return next without negative entries and NaN, with the sum 1, got "
            f"entries from {lowest:g} with the sum {total:g}{where}"
        )


@dataclass(frozen=True)
class Verifier:
    """A rule of the user's own in the place of the ops that verify.

    Attributes:
        rule: of the user.
        active: [B], the sequences that it is asked about.
        numbers: of the sequences, for messages.
    """

    rule: OwnRule
    active: NDArray[np.bool_]
    numbers: list[int]

    def verify_chain(
        self, target: torch.Tensor, tokens: torch.Tensor, draft: Any, **arguments: Any
    ) -> Verdict:
        """As `specdec_kernels.verify_chain`."""
        above = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
        verdict = self._verify(target, Tree(tokens, above), draft, trees=False, **arguments)
        return Verdict(*verdict[1:])

    def verify_tree(
        self, target: torch.Tensor, tree: Tree, draft: Any, **arguments: Any
    ) -> TreeVerdict:
        """As `specdec_kernels.verify_tree`."""
        return self._verify(target, tree, draft, trees=True, **arguments)

    def _verify(
        self, target: torch.Tensor, tree: Tree, draft: SampledDraft | None, *, trees: bool,
        seeds: torch.Tensor, positions: torch.Tensor, rule: str, with_accept_probs: bool,
        max_depth: int | None = None, draft_rows: torch.Tensor | None = None, **sampling: Any,
    ) -> TreeVerdict:  # fmt: skip
        batch_size, size = tree.tokens.shape
        vocab_size, device = target.shape[-1], target.device
        depth = size if max_depth is None else max_depth
        rows = _Rows.of(target, sampling, seeds, positions)
        uniforms = acceptance_uniforms(seeds, positions, size + 1, rule="block").to(device)
        status, starts = rows.status[:, 0].tolist(), positions.tolist()
        paths: list[list[int]] = [[] for _ in range(batch_size)]
        following = torch.zeros(batch_size, vocab_size, dtype=torch.float64, device=device)
        following[:, 0] = 1.0  # of sequences that emit nothing
        for b in np.flatnonzero(self.active & (rows.status[:, 0] == 0)).tolist():
            draft_probs = None if draft is None else _draft_probs(draft, b, vocab_size)
            valid = torch.ones(size, dtype=torch.bool, device=device)
            if draft_probs is not None:
                if draft_rows is not None:
                    draft_probs = draft_probs[draft_rows[b]]
                valid = draft_probs.isfinite().all(dim=-1)
            ids, above = tree.tokens[b].tolist(), tree.parents[b].tolist()
            nodes, parents, fault = _present(ids, above, valid.tolist(), vocab_size, depth)
            status[b] |= fault
            where = f" for sequence {self.numbers[b]} at position {starts[b]}"
            target_probs = rows.probs(b, [0, *(node + 1 for node in nodes)], where)
            if not nodes:
                following[b] = target_probs[0]
                continue
            decision = ask_rule(
                self.rule, target_probs, None if draft_probs is None else draft_probs[nodes],
                tree.tokens[b, nodes], uniforms[b, : len(nodes) + 1],
                torch.tensor(parents, device=device) if trees else None, where,
            )  # fmt: skip
            paths[b], following[b] = [nodes[n] for n in decision.path], decision.following
        faults = torch.tensor(status, dtype=torch.int32, device=device)
        return self._draw(rows, tree, paths, following, faults, depth, seeds, positions)

    def _draw(
        self, rows: _Rows, tree: Tree, paths: list[list[int]], following: torch.Tensor,
        status: torch.Tensor, depth: int, seeds: torch.Tensor, positions: torch.Tensor,
    ) -> TreeVerdict:  # fmt: skip
        """Draw the last tokens as the other rules do, by the noise of their positions."""
        device = following.device
        counts = torch.tensor([len(path) for path in paths], device=device)
        padded = [[*nodes, *[-1] * (depth - len(nodes))] for nodes in paths]
        path = torch.tensor(padded, dtype=torch.int64, device=device)
        last = verify_chain(
            following[:, None].float(), tree.tokens[:, :0], kind="probs", rule="token",
            temperature=(rows.temperature > 0).float(), seeds=seeds, positions=positions + counts,
        ).tokens  # fmt: skip
        emits = to_device(self.active, device) & (status & ~_OF_DRAFTS == 0)
        tokens = torch.nn.functional.pad(path, (0, 1), value=-1)
        if depth:
            tokens[:, :-1] = tree.tokens.gather(1, path.clamp(min=0)).masked_fill(path < 0, -1)
        tokens.scatter_(1, counts[:, None], last.masked_fill(~emits[:, None], -1))
        logprobs = rows.logprobs(torch.nn.functional.pad(path + 1, (1, 0)), tokens)
        unknown = torch.full(tree.tokens.shape, torch.nan, device=device)
        return TreeVerdict(path, tokens, counts.int(), status, logprobs, unknown)


_OF_DRAFTS = int(Status.DRAFT_INVALID | Status.DRAFT_OUT_OF_RANGE)


def _present(
    tokens: list[int], parents: list[int], valid: list[bool], vocab_size: int, depth: int
) -> tuple[list[int], list[int], int]:
    """The nodes that a rule is asked about, the number of each one's parent among them, faults."""
    number, depths, fault = {-1: -1}, {-1: 0}, Status(0)
    for n, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent not in number or token == -1 or depths[parent] == depth:
            continue
        if not 0 <= token < vocab_size:
            fault |= Status.DRAFT_OUT_OF_RANGE
        elif not valid[n]:
            fault |= Status.DRAFT_INVALID
        else:
            number[n], depths[n] = len(number) - 1, depths[parent] + 1
    nodes = [n for n in number if n >= 0]
    return nodes, [number[parents[n]] for n in nodes], int(fault)


@dataclass(frozen=True)
class _Rows:
    """The target's rows.

    Attributes:
        logits: [B, M, V].
        temperature: [B] float32.
        sampled: fields [B, M]; its tokens are the argmax at temperature 0.
        status: [B, M] on the host.
    """

    logits: torch.Tensor
    temperature: torch.Tensor
    sampled: Sampled
    status: NDArray[np.int32]

    @classmethod
    def of(
        cls, logits: torch.Tensor, sampling: dict[str, Any], seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> _Rows:  # fmt: skip
        batch_size, count = logits.shape[:2]
        repeated: dict[str, Any] = {
            name: x.repeat_interleave(count) if isinstance(x, torch.Tensor) else x
            for name, x in {**sampling, "seeds": seeds, "positions": positions}.items()
        }
        flat = sample(logits.flatten(0, 1), **repeated)
        sampled = Sampled(*(x.view(batch_size, count) for x in flat))
        temperature = torch.as_tensor(
            sampling["temperature"], dtype=torch.float32, device=logits.device
        ).expand(batch_size)
        return cls(logits, temperature, sampled, sampled.status.cpu().numpy())

    def probs(self, b: int, at: list[int], where: str) -> torch.Tensor:
        """[n, V] float64, P of some rows of a sequence; those of greedy ones are one-hot.

        Raises:
            RuntimeError: a row holds no distribution.
        """
        for n in at:
            if self.status[b, n]:
                raise RuntimeError(f"logits after draft {n - 1} of a round are not finite{where}")
        if self.temperature[b] == 0:
            best, size = self.sampled.tokens[b, at], self.logits.shape[-1]
            return torch.nn.functional.one_hot(best, size).double()
        statistics = (self.sampled.logsumexp[b, at], self.sampled.threshold[b, at])
        return _probs(self.logits[b, at], self.temperature[b], *statistics)

    def logprobs(self, at: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[B, n] float32 of tokens in the rows ``at`` [B, n]; 0 as in `TreeVerdict`."""
        sequences = torch.arange(len(at), device=at.device)[:, None]
        logits = self.logits[sequences, at, tokens.clamp(min=0)]
        found = logits.double() / self.temperature.double()[:, None]
        found = found - self.sampled.logsumexp.gather(1, at)
        found = found.masked_fill(logits < self.sampled.threshold.gather(1, at), -torch.inf)
        without = (tokens < 0) | (self.temperature == 0)[:, None]
        return found.masked_fill(without, 0.0).float()


def _draft_probs(draft: SampledDraft, b: int, vocab_size: int) -> torch.Tensor | None:
    """[M, V] float64, Q of a sequence, not finite where a row is invalid; None at temperature 0.

    Raises:
        ValueError: Q is over more tokens than the target has.
    """
    missing = vocab_size - draft.logits.shape[-1]
    if missing < 0:
        raise ValueError(
            f"a rule of your own needs draft distributions of at most {vocab_size} tokens, as many "
            f"as the model has, got {draft.logits.shape[-1]}"
        )
    temperature = torch.as_tensor(draft.temperature, dtype=torch.float32)
    temperature = temperature.expand(len(draft.logits))[b].to(draft.logits.device)
    if temperature == 0:
        return None
    probs = _probs(draft.logits[b], temperature, draft.logsumexp[b], draft.threshold[b])
    return torch.nn.functional.pad(probs, (0, missing))


def _probs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    logsumexp: torch.Tensor,
    threshold: torch.Tensor,
) -> torch.Tensor:
    """[n, V] float64, the distributions that `sample` draws from; see `Sampled`."""
    probs = (logits.double() / temperature.double() - logsumexp[:, None]).exp()
    probs = probs.masked_fill(logits < threshold[:, None], 0.0)
    return probs / probs.sum(dim=-1, keepdim=True)


def verify_without_residual(
    target: torch.Tensor, draft_token_ids: torch.Tensor, draft: Any, **arguments: Any
) -> Verdict:
    """`verify_chain` whose recovered token is drawn from P, as after a draft that ended there.

    Rule token decides draft i by the uniform of its position, so the second verification, which is
    shown the accepted drafts alone, accepts them again. Then it draws from P, as `verify_chain`
    does where there is no draft.
    """
    first = verify_chain(target, draft_token_ids, draft, **arguments)
    number = torch.arange(draft_token_ids.shape[1], device=draft_token_ids.device)
    accepted = draft_token_ids.masked_fill(number >= first.num_accepted[:, None], -1)
    second = verify_chain(target, accepted, draft, **arguments)
    return second._replace(status=first.status | second.status, accept_probs=first.accept_probs)
