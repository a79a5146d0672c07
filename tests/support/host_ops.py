"""The arguments of torch ops as those of specdec_host, and a comparison of results bit for bit."""

from __future__ import annotations

import specdec_host
import torch
from specdec_host import DraftMap, SampledDraft, SparseDraft, Tree

from specdec_kernels.arguments.rules import KINDS, METHODS, NOISES, RULES, TREE_RULES

PARAMETERS = {
    "temperatures": "temperature",
    "top_ks": "top_k",
    "top_ps": "top_p",
    "min_ps": "min_p",
}
NAMES = {"kind": KINDS, "noise": NOISES, "method": METHODS}


def arguments_of(op):
    """The names of the arguments of an op, in the order of its schema."""
    return [a.name for a in getattr(torch.ops.specdec_kernels, op).default._schema.arguments]


def as_numpy(value):
    """A tensor as a NumPy array over its memory; bfloat16 as specdec_host.bfloat16."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(specdec_host.bfloat16)
    return value.numpy()


def draft_of(given, read):
    """The form of the draft that the arguments of a verifier hold."""
    names = ("draft", "draft_ids", "draft_columns", "draft_logsumexp", "draft_threshold")
    rows, ids, columns, logsumexp, threshold = (read(given.pop(n)) for n in names)
    vector, scalar = read(given.pop("draft_temperatures")), given.pop("draft_temperature")
    draft_map = None if columns is None else DraftMap(columns)
    if ids is not None:
        return SparseDraft(ids, rows), draft_map
    if logsumexp is not None:
        temperature = scalar if vector is None else vector
        return SampledDraft(rows, logsumexp, threshold, temperature), draft_map
    return rows, draft_map


def call(op, args, read=as_numpy):
    """A public function of specdec_host with the arguments of an op in the order of its schema.

    read: makes an array of each tensor.
    """
    given = dict(zip(arguments_of(op), args, strict=True))
    for vector, scalar in PARAMETERS.items():
        given[scalar] = read(given[scalar] if given[vector] is None else given[vector])
        del given[vector]
    for name, names in NAMES.items():
        if name in given:
            given[name] = names[given[name]]
    if op != "sample":
        given["rule"] = (RULES if op == "verify_chain" else TREE_RULES)[given["rule"]]
        given["draft"], given["draft_map"] = draft_of(given, read)
    if op == "verify_tree":
        given["tree"] = Tree(read(given.pop("tree_tokens")), read(given.pop("parents")))
    given = {n: read(v) if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    return getattr(specdec_host, op)(**given)


def check_equal_bits(got, expected):
    """Outputs of a call of specdec_host and of a torch op."""
    assert len(got) == len(expected)
    for name, a, t in zip(got._fields, got, expected, strict=True):
        b = t.numpy()
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.tobytes() == b.tobytes(), f"{name}: {a} is not {b}"
