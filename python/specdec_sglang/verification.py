"""A step of SGLang, verified by `verify_tree`: nothing here imports SGLang."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels import Tree, verify_tree
from specdec_kernels.compat.linked_tree import parents_of_links, write_path_


class Step(NamedTuple):
    """What is known of a step before its tree is verified.

    logits: [B*N, V] float32, bfloat16 or float16, which SGLang still processes in place.
    temperature, top_p, min_p: [B]; temperature 0 for greedy requests.
    top_k: [B] int32, 0 for all tokens.
    seeds: [B] int64.
    positions: [B] int64, how many tokens each request has before the root of its tree.
    """

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    @classmethod
    def of(cls, logits: Tensor, lengths: Tensor, sampling: Any) -> Step:
        """From the lengths [B] and the `SamplingBatchInfo`, whose top_k 1 means greedy.

        Requests have seeds in SGLang's deterministic mode; otherwise torch's default generator
        draws one for each request and step.
        """
        top_k = sampling.top_ks
        seeds = sampling.sampling_seed
        if seeds is None:
            seeds = torch.randint(2**63 - 1, lengths.shape, device=lengths.device)
        return cls(
            logits,
            torch.where(top_k == 1, 0.0, sampling.temperatures.view(-1)),
            torch.where(top_k >= logits.shape[-1], 0, top_k),
            sampling.top_ps,
            sampling.min_ps,
            seeds.long(),
            lengths.long(),
        )


def verify_step_(
    step: Step,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
) -> list[int]:
    """Writes the first three, as the functions of `specdec_kernels.compat.sglang` do.

    Rule target_only of `verify_tree` decides: it draws a token from the target's distribution and
    accepts the child that equals it.

    Returns:
        The requests whose row holds no distribution. They get the token with the largest finite
        logit, because SGLang counts on a token of each.
    """
    b, n = candidates.shape
    index, rows = retrieve_index.flatten(), step.logits
    if len(rows) != b * n or not torch.equal(index, torch.arange(b * n)):  # else it would copy
        rows = rows[index]
    rows = rows.view(b, n, -1)
    parents = parents_of_links(retrieve_next_token, retrieve_next_sibling)[:, 1:]
    # No link leads to a node without a parent.
    tree = Tree(torch.where(parents < 0, -1, candidates[:, 1:]), (parents - 1).clamp(min=-1))
    verdict = verify_tree(
        rows, tree, rule="target_only", max_depth=accept_index.shape[1] - 1, with_logprobs=False,
        **{name: value for name, value in step._asdict().items() if name != "logits"},
    )  # fmt: skip
    nodes = torch.nn.functional.pad(verdict.path + 1, (1, 0)).long()
    last = verdict.num_accepted.long()[:, None]
    tokens = verdict.tokens
    missing = (tokens.gather(1, last) < 0)[:, 0].nonzero()[:, 0]
    if len(missing):
        at = last[missing, 0]
        row = rows[missing, nodes[missing, at]]
        tokens[missing, at] = torch.where(row.isfinite(), row, -torch.inf).argmax(-1)
    write_path_(
        nodes, tokens, verdict.num_accepted, predicts, accept_index, accept_token_num,
        retrieve_index,
    )  # fmt: skip
    return missing.tolist()
