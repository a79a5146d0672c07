"""Arguments of `sample` and of the verifiers that every check accepts, each open to a change."""

import torch
from support.kv_error_table import i64
from support.providers import number, sampling_arguments

from specdec_kernels.arguments.rules import KINDS, METHODS, NOISES, RULES, TREE_RULES


def sample_args(logits=None, seeds=None, positions=None, noise="draft", method="cdf", **filters):
    return (
        torch.zeros(3, 7) if logits is None else logits,
        *sampling_arguments(**filters),
        i64(3) if seeds is None else seeds,
        i64(3) if positions is None else positions,
        number(noise, NOISES),
        number(method, METHODS),
    )


def chain_args(target=None, tokens=None, draft=None, ids=None, columns=None, lse=None,
               threshold=None, ts=None, t=1.0, kind="logits", rule="token", seeds=None,
               positions=None, target_indptr=None, uniforms=None, lenience=1.0, epsilon=0.09,
               delta=0.3, rates=None, eos_token_ids=None, max_new_tokens=None,
               **filters):  # fmt: skip
    return (
        torch.zeros(3, 5, 7) if target is None else target,
        i64(3, 4) if tokens is None else tokens,
        *(draft, ids, columns, lse, threshold, ts, t, number(kind, KINDS), number(rule, RULES)),
        *sampling_arguments(**filters),
        i64(3) if seeds is None else seeds,
        i64(3) if positions is None else positions,
        *(target_indptr, uniforms, lenience, epsilon, delta, rates, eos_token_ids, max_new_tokens),
        *(True, True),
    )


def tree_args(target=None, tokens=None, parents=None, draft=None, ids=None, columns=None, lse=None,
              threshold=None, ts=None, t=1.0, draft_rows=None, kind="logits", rule="multi_draft",
              seeds=None, positions=None, target_indptr=None, uniforms=None, epsilon=0.09,
              delta=0.3, eos_token_ids=None, max_new_tokens=None, max_depth=4,
              **filters):  # fmt: skip
    return (
        torch.zeros(3, 5, 7) if target is None else target,
        i64(3, 4) if tokens is None else tokens,
        torch.full((3, 4), -1) if parents is None else parents,
        *(draft, ids, columns, lse, threshold, ts, t, draft_rows),
        *(number(kind, KINDS), number(rule, TREE_RULES)),
        *sampling_arguments(**filters),
        i64(3) if seeds is None else seeds,
        i64(3) if positions is None else positions,
        *(target_indptr, uniforms, epsilon, delta, eos_token_ids, max_new_tokens, max_depth),
        *(True, True),
    )
