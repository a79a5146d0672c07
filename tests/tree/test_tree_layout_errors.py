"""Invalid arguments of the layout ops and of `ngram_propose`.

Providers and fake kernels raise the same messages.
"""

from __future__ import annotations

import re

import proofs
import pytest
import torch
from support.providers import provider

import specdec_kernels as sk

WHERE = [n for n in ("cpp", "triton") if n in proofs.providers("build_trie")]


def i64(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def f32(*shape):
    return torch.zeros(shape)


HUGE = i64(1, 1).expand(2**29, 2**29)  # holds no memory

GOOD = {
    "tree_attention": dict(parents=i64(3, 4), lengths=i64(3), slots=9, window=0),
    "rerank_tree": dict(tokens=i64(3, 4), parents=i64(3, 4), scores=f32(3, 4), size=2),
    "build_trie": dict(sequences=i64(3, 2, 4), size=5, merge=True),
    "expand_tree": dict(
        logits=f32(3, 2, 7), scores=f32(3, 2), width=2, temperatures=None, temperature=1.0
    ),
    "ngram_propose": dict(history=i64(3, 9), lengths=i64(3), gamma=4, max_ngram=3, min_ngram=2),
}
TABLE = [
    ("tree_attention", dict(parents=i64(4)), r"parents must be \[B, N\], got \[4\]"),
    ("tree_attention", dict(parents=f32(3, 4)), "parents must be int32 or int64, got float32"),
    ("tree_attention", dict(lengths=i64(2)), r"lengths must be \[3\], got \[2\]"),
    ("tree_attention", dict(lengths=i64(3).short()), "lengths must be int32 or int64, got int16"),
    ("tree_attention", dict(slots=-1), "slots must be at least 0, got -1"),
    ("tree_attention", dict(window=-2),
     r"window must be at least 0 \(0 sees every key\), got -2"),
    ("tree_attention", dict(slots=2**62),
     r"slots must leave the mask \[B, N\+1, S\] with less than 2\*\*56 entries, "
     r"got \[3, 5, 4611686018427387904\]"),
    ("tree_attention", dict(parents=HUGE),
     r"parents must leave the positions \[B, N\] with less than 2\*\*56 entries, "
     r"got \[536870912, 536870912\]"),
    ("tree_attention", dict(parents=i64(0, 1).expand(0, 2**63 - 1), lengths=i64(0)),
     r"parents must leave the positions \[B, N\] with less than 2\*\*56 entries, "
     r"got \[0, 9223372036854775807\]"),
    ("rerank_tree", dict(tokens=HUGE, parents=HUGE, scores=f32(1, 1).expand(2**29, 2**29),
                         size=2**30),
     r"size must leave the tree \[B, size\] with less than 2\*\*56 entries, "
     r"got \[536870912, 1073741824\]"),
    ("build_trie", dict(sequences=HUGE[:, None], size=2**30),
     r"size must leave the tree \[B, size\] with less than 2\*\*56 entries, "
     r"got \[536870912, 1073741824\]"),
    ("build_trie", dict(sequences=HUGE[:, None]),
     r"sequences must leave the nodes \[B, K, L\] with less than 2\*\*56 entries, "
     r"got \[536870912, 1, 536870912\]"),
    ("expand_tree", dict(logits=f32(1, 1, 1).expand(2**30, 2**30, 1),
                         scores=f32(1, 1).expand(2**30, 2**30)),
     r"logits must leave the children \[B, F, width\] with less than 2\*\*56 entries, "
     r"got \[1073741824, 1073741824, 2\]"),
    ("rerank_tree", dict(tokens=i64(4)), r"tokens must be \[B, M\], got \[4\]"),
    ("rerank_tree", dict(tokens=f32(3, 4)), "tokens must be int32 or int64, got float32"),
    ("rerank_tree", dict(parents=i64(3, 5)), r"parents must be \[B, M\] = \[3, 4\], got \[3, 5\]"),
    ("rerank_tree", dict(parents=i64(12)), r"parents must be \[B, M\] = \[3, 4\], got \[12\]"),
    ("rerank_tree", dict(parents=f32(3, 4)), "parents must be int32 or int64, got float32"),
    ("rerank_tree", dict(scores=f32(2, 4)), r"scores must be \[B, M\] = \[3, 4\], got \[2, 4\]"),
    ("rerank_tree", dict(scores=f32(3, 4).double()), "scores must be float32, got float64"),
    ("rerank_tree", dict(size=-1), r"size must be in \[0, 2147483647\], got -1"),
    ("rerank_tree", dict(size=2**31), r"size must be in \[0, 2147483647\], got 2147483648"),
    ("build_trie", dict(sequences=i64(3, 4)), r"sequences must be \[B, K, L\], got \[3, 4\]"),
    ("build_trie", dict(sequences=f32(3, 2, 4)), "sequences must be int32 or int64, got float32"),
    ("build_trie", dict(size=-1), r"size must be in \[0, 2147483647\], got -1"),
    ("expand_tree", dict(logits=f32(3, 7)), r"logits must be \[B, F, V\], got \[3, 7\]"),
    ("expand_tree", dict(logits=i64(3, 2, 7)),
     "logits must be float32, bfloat16 or float16, got int64"),
    ("expand_tree", dict(logits=f32(3, 2, 0)),
     r"logits must have a vocabulary of 1 to 2147483647 entries, got \[3, 2, 0\]"),
    ("expand_tree", dict(logits=f32(3, 7, 2).mT),
     "logits must have a contiguous last dimension, got stride 2"),
    ("expand_tree", dict(logits=f32(3, 0, 7), scores=f32(3, 0)),
     r"logits must have a frontier of at least one node, got \[3, 0, 7\]"),
    ("expand_tree", dict(scores=f32(3, 1)), r"scores must be \[B, F\] = \[3, 2\], got \[3, 1\]"),
    ("expand_tree", dict(scores=f32(3)), r"scores must be \[B, F\] = \[3, 2\], got \[3\]"),
    ("expand_tree", dict(scores=f32(3, 2).half()), "scores must be float32, got float16"),
    ("expand_tree", dict(width=0), r"width must be in \[1, 64\], got 0"),
    ("expand_tree", dict(width=65), r"width must be in \[1, 64\], got 65"),
    ("expand_tree", dict(temperature=-1.0), "temperature must be finite and at least 0, got -1"),
    ("expand_tree", dict(temperatures=f32(2)), r"temperature must be \[3\], got \[2\]"),
    ("expand_tree", dict(temperatures=f32(3).double()),
     "temperature must be float32, got float64"),
    ("ngram_propose", dict(history=i64(9)), r"history must be \[B, L\], got \[9\]"),
    ("ngram_propose", dict(history=f32(3, 9)), "history must be int32 or int64, got float32"),
    ("ngram_propose", dict(history=i64(3, 1).expand(3, 2**31)),
     r"history must have at most 2147483647 columns, got \[3, 2147483648\]"),
    ("ngram_propose", dict(lengths=i64(4)), r"lengths must be \[3\], got \[4\]"),
    ("ngram_propose", dict(lengths=i64(3, 1)), r"lengths must be \[3\], got \[3, 1\]"),
    ("ngram_propose", dict(lengths=i64(3).short()), "lengths must be int32 or int64, got int16"),
    ("ngram_propose", dict(gamma=-1), r"gamma must be in \[0, 2147483647\], got -1"),
    ("ngram_propose", dict(gamma=2**31), r"gamma must be in \[0, 2147483647\], got 2147483648"),
    ("ngram_propose", dict(history=i64(1, 9).expand(2**27, 9), lengths=i64(1).expand(2**27),
                           gamma=2**30),
     r"gamma must leave the tokens \[B, gamma\] with less than 2\*\*56 entries, "
     r"got \[134217728, 1073741824\]"),
    ("ngram_propose", dict(min_ngram=0), "min_ngram must be at least 1, got 0"),
    ("ngram_propose", dict(max_ngram=1), "max_ngram must be at least min_ngram = 2, got 1"),
    ("ngram_propose", dict(max_ngram=-1), "max_ngram must be at least min_ngram = 2, got -1"),
]  # fmt: skip
DEVICES = [
    ("tree_attention", "lengths", "parents"),
    ("rerank_tree", "parents", "tokens"),
    ("rerank_tree", "scores", "tokens"),
    ("expand_tree", "scores", "logits"),
    ("ngram_propose", "lengths", "history"),
]


def call(op, where, **bad):
    arguments = GOOD[op] | bad
    if where == "meta":
        where, arguments = "cpp", on_meta(arguments)
    return provider(op, where)(*arguments.values())


def on_meta(arguments):
    return {k: v.to("meta") if torch.is_tensor(v) else v for k, v in arguments.items()}


def says(op, where, **bad):
    with pytest.raises(RuntimeError) as error:
        call(op, where, **bad)
    return str(error.value).strip().splitlines()[0]


@pytest.mark.parametrize("where", [*WHERE, "meta"])
@pytest.mark.parametrize("op", GOOD)
def test_a_message_names_the_argument_the_rule_and_the_value(op, where):
    said = [(says(op, where, **bad), message) for name, bad, message in TABLE if name == op]
    assert [pair for pair in said if not re.fullmatch(pair[1], pair[0])] == []


@pytest.mark.parametrize(("op", "name", "of"), DEVICES)
def test_devices_are_checked(op, name, of):
    """One argument stays on the CPU, all the others are on another device."""
    text = says(op, "cpp", **(on_meta(GOOD[op]) | {name: GOOD[op][name]}))
    assert text == f"{name} must be on the device of {of}, meta, got cpu"


@pytest.mark.parametrize("where", [*WHERE, "meta"])
@pytest.mark.parametrize("op", GOOD)
def test_good_inputs_raise_nothing(op, where):
    got, want = call(op, where), call(op, "reference")
    assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in want]


def test_public_arguments_are_named():
    with pytest.raises(TypeError, match=r"temperature must be a number or a tensor, got \[1\]"):
        sk.expand_tree(f32(1, 1, 3), f32(1, 1), width=1, temperature=[1])
    with pytest.raises(RuntimeError, match=r"sequences must be \[B, K, L\], got \[3\]"):
        sk.build_trie(i64(3))
