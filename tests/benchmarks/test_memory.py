"""No call may allocate memory that grows with rows times vocabulary.

One process makes all calls. A buffer kept between calls counts for the first call that needs
it or that needs it to be so large. The high-water mark of the resident set counts allocations of
PyTorch and of C++ alike.
"""

from __future__ import annotations

import functools
import json

import pytest
from support.programs import output_of

from specdec_kernels import TREE_RULES

pytestmark = pytest.mark.build

MIB = 2**20
V = 262144
SIZES = (128, 512)  # rows: 64 and 256 MiB of bfloat16 have to keep to the same limit
LIMIT = 4 * MIB
FILTERED = "temperature=0.8, top_k=50, top_p=0.9, min_p=0.01"

# Each call is first made with few rows, which loads the code and tables that a process needs once.
PROGRAM = """
import json
import sys

import torch
import specdec_kernels as sk
from bench import eager, measure

torch.set_num_threads(2)
GAMMA = 7

def rows(n, v):  # equal rows
    x = torch.empty(n, v, dtype=torch.bfloat16)
    x.copy_(torch.linspace(8, -8, v).to(torch.bfloat16)[torch.arange(v) * 7919 % v])
    return x

def sample(logits, **options):
    zeros = torch.zeros(len(logits), dtype=torch.int64)
    return lambda: sk.sample(logits, seeds=zeros, positions=zeros, **options)

def near(target):
    return target[:, :GAMMA] * 1.3  # overconfident: drafts are accepted and rejected

def sampled(target):
    draft = near(target)
    zeros = torch.zeros(draft.shape[:2].numel(), dtype=torch.int64)
    drawn = sk.sample(draft.flatten(0, 1), seeds=zeros, positions=zeros, top_k=100)
    statistics = (t.view(draft.shape[:2]) for t in (drawn.logsumexp, drawn.threshold))
    return sk.SampledDraft(draft, *statistics, temperature=1.0)

def sparse(target):
    likely = target[0, 0].topk(64)
    shape = (len(target), GAMMA, 64)
    probs = likely.values.float().softmax(-1)
    return sk.SparseDraft(likely.indices.expand(shape), probs.expand(shape))

def likely_tokens(target):
    return target[0, 0].argmax().expand(len(target), GAMMA)

def mapped(target, **options):
    v = target.shape[-1]
    options["draft_map"] = sk.DraftMap.from_ids(torch.arange(v - 1, v // 3, -1), v)
    return near(target)[..., : v - 1 - v // 3].contiguous(), options

FORMS = {"none": lambda target: None, "full": near, "sampled": sampled, "sparse": sparse}

def chain(logits, form="full", **options):
    v = logits.shape[1]
    target = logits.view(-1, GAMMA + 1, v)
    seeds = torch.arange(len(target))
    tokens = likely_tokens(target)
    if form == "mapped":
        draft, options = mapped(target, **options)
    else:
        draft = FORMS[form](target)
    if options.get("kind") == "probs":
        target, draft = target.softmax(-1), draft.softmax(-1)
    return lambda: sk.verify_chain(target, tokens, draft, seeds=seeds, positions=seeds, **options)

def tree(logits, **options):
    target = logits.view(-1, GAMMA + 1, logits.shape[1])
    seeds, draft = torch.arange(len(target)), near(target)
    parents = (torch.arange(GAMMA) // 2 - 1).expand(len(target), GAMMA)
    nodes = sk.Tree(likely_tokens(target), parents)
    return lambda: sk.verify_tree(target, nodes, draft, seeds=seeds, positions=seeds, **options)

def expand(logits):
    rows = logits.view(-1, GAMMA + 1, logits.shape[1])
    scores = torch.zeros(rows.shape[:2])
    return lambda: sk.expand_tree(rows, scores, width=10)

def plain_rule(logits):
    target = logits.view(-1, GAMMA + 1, logits.shape[1])
    tokens = likely_tokens(target)
    return lambda: eager.verify_chain(target, tokens, target[:, :GAMMA])

calls, sizes, v = map(json.loads, sys.argv[1:])
makers = {name: eval("lambda x: " + call) for name, call in calls.items()}
for make in makers.values():
    make(rows(8, 4096 * 3))()
print(json.dumps([
    {name: measure.peak_extra(make(rows(n, v)), "cpu") for name, make in makers.items()}
    for n in sizes
]))
"""

OTHER_RULES = ("greedy", "typical", "top_beta", "lenient")
CALLS = {
    "sample": "sample(x)",
    "sample-filtered": f"sample(x, {FILTERED})",
    "sample-gumbel": 'sample(x, method="gumbel")',
    "chain": "chain(x)",
    "chain-one-hot": 'chain(x, "none")',
    "chain-filtered": f"chain(x, {FILTERED})",
    "chain-match-filtered": f'chain(x, "none", rule="match", {FILTERED})',
    "chain-block": 'chain(x, rule="block")',
    "chain-block-filtered": f'chain(x, rule="block", {FILTERED})',
    "chain-typical": 'chain(x, "none", rule="typical")',
    "chain-top-beta": 'chain(x, "none", rule="top_beta", top_beta_rank=3, top_beta_distance=9.0)',
    "chain-probs": 'chain(x, kind="probs")',
    "chain-sampled": 'chain(x, "sampled")',
    "chain-block-sparse": 'chain(x, "sparse", rule="block")',
    "chain-mapped": 'chain(x, "mapped")',
    "expand": "expand(x)",
    **{f"chain-{r}-filtered": f'chain(x, rule="{r}", {FILTERED})' for r in OTHER_RULES},
    **{f"tree-{r}-filtered": f'tree(x, rule="{r}", {FILTERED})' for r in TREE_RULES},
}


@functools.cache
def peaks(sizes, eager=False):
    """{rows: {call: peak extra bytes}}, measured in one process."""
    calls = {"eager": "plain_rule(x)"} if eager else CALLS
    words = map(json.dumps, (calls, sizes, V))
    found = json.loads(output_of("-c", PROGRAM, *words))
    if any(None in by_call.values() for by_call in found):
        pytest.skip("the system does not reset the resident set's high-water mark")
    return dict(zip(sizes, found, strict=True))


@pytest.mark.parametrize("call", CALLS)
def test_extra_memory_does_not_grow_with_rows_times_vocabulary(call):
    extra = {rows: peaks(SIZES)[rows][call] for rows in SIZES}
    assert max(extra.values()) < LIMIT, f"bytes beside {V} bfloat16 logits a row: {extra}"


def test_the_measurement_sees_that_the_eager_rule_copies_every_row():
    rows = SIZES[0] // 4
    assert peaks((rows,), eager=True)[rows]["eager"] > 2 * rows * V * 4
