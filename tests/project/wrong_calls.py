"""Calls of every op that must raise, each with its whole message.

Most follow from `CALLS`, which declares what the arguments of valid calls must be: a tensor of
another dtype, number of dimensions or size, one whose last dimension is not contiguous, and numbers
beside their range. special_calls.py has what depends on several arguments. A row of `TABLE` is
(op, what to change in the good arguments of BUILD, the message as a regular expression); `changed`
among the changes replaces arguments by their names in the op's schema.
"""

import math
import re

import torch
from project.special_calls import (
    PANELS,
    Q4_1,
    RAGGED,
    SPARSE,
    SPECIAL,
    Q,
    f32,
    f64,
    i32,
    i64,
    packed,
    shown,
)
from support.providers import sample, sampling_arguments, verify, verify_tree

from specdec_kernels import (
    RULES,
    TREE_RULES,
    PackedDecoderLayer,
    PackedDecoderLayers,
    PackedHead,
    Tree,
    pack_blocks,
    pack_linear,
)
from specdec_kernels.arguments.weight_blocks import BLOCK_FORMATS


def arguments_of(op):
    """The names of the arguments of an op, in the order of its schema."""
    return [a.name for a in getattr(torch.ops.specdec_kernels, op).default._schema.arguments]


def weighted(names, at, sizes, **good):
    """As `built` with packed weights among the arguments, which `weights` replaces together."""

    def build(weights=None, **bad):
        panels, ins, outs = weights or packed(*sizes)
        values = (panels,) if len(names) == 1 else (panels[0], panels[1:])
        given = dict(zip(names, values, strict=True), ins=ins, outs=outs)
        items = list(good.items())
        return tuple((dict(items[:at]) | given | dict(items[at:]) | bad).values())

    return build


def built(good, call=None):
    """A function that makes the arguments of an op from good ones, some of them changed."""
    return lambda **bad: call(lambda *a: a, **good | bad) if call else tuple((good | bad).values())


def kept(op, target, rows=None, target_indptr=None, kind=0, max_kept=4, bitmask=None, **filters):
    return op(target, rows, target_indptr, kind, max_kept, *sampling_arguments(**filters), bitmask)


NOISE = dict(seeds=i64(3), positions=i64(3))
DRAFTED = dict(target=f32(3, 5, 7), tokens=i64(3, 4)) | NOISE
ROOTS = torch.full((3, 4), -1)
CACHES, CUT = dict(caches=[f32(3, 2, 5, 4)]), dict(lengths=i64(3), new_lengths=i64(3))
PATH, POOL = dict(base=i64(3), path=i64(3, 2)), dict(caches=[f32(7, 4, 2, 8)])
BLOCKS = dict(tables=i32(3, 2))
MAKE = {
    "sample": built(dict(logits=f32(3, 7), method="cdf") | NOISE, sample),
    "verify_chain": built(DRAFTED, verify),
    "verify_tree": built(DRAFTED | dict(parents=ROOTS, rule="multi_draft", max_depth=4),
                         verify_tree),
    "kept_tokens": built(dict(target=f32(3, 5, 7)), kept),
    "apply_penalties_": built(
        dict(target=f32(3, 5, 7), tokens=i64(3, 4), parents=None, indptr=None, counts=None,
             prompt=None, rs=None, r=1.0, ps=None, p=0.0, fs=None, f=0.0, ids=None, biases=None,
             least=None, ends=None)),
    "kv_append_": built(CACHES | dict(entries=[f32(3, 2, 3, 4)], positions=i64(3))),
    "kv_truncate_": built(CACHES | CUT | dict(fill=True)),
    "kv_compact_": built(CACHES | PATH),
    "paged_append_": built(POOL | dict(entries=[f32(3, 1, 2, 8)]) | BLOCKS
                           | dict(positions=i64(3), counts=i64(3))),
    "paged_compact_": built(POOL | BLOCKS | PATH),
    "paged_truncate_": built(BLOCKS | CUT | dict(block_size=4)),
    "kv_realign_": built(CACHES | dict(starts=i64(3), lengths=i64(3), shifts=i64(3), fill=False)),
    "ring_truncate_": built(CACHES | CUT | dict(window=5, fill=True)),
    "tree_attention": built(dict(parents=i64(3, 4), lengths=i64(3), slots=9, window=0)),
    "rerank_tree": built(dict(tokens=i64(3, 4), parents=i64(3, 4), scores=f32(3, 4), size=2)),
    "build_trie": built(dict(sequences=i64(3, 2, 4), size=5, merge=True)),
    "expand_tree": built(dict(logits=f32(3, 2, 7), scores=f32(3, 2), width=2, temperatures=None,
                              temperature=1.0)),
    "ngram_propose": built(dict(history=i64(3, 9), lengths=i64(3), gamma=4, max_ngram=3,
                                min_ngram=2)),
    "pack_linear": built(dict(weight=f32(3, 5))),
    "pack_blocks": built(dict(blocks=Q4_1, format=2)),
    "unpack_blocks": built(dict(panels=pack_blocks(Q4_1, "Q4_1").panels, in_features=64,
                                out_features=3)),
    "packed_linear": built(dict(x=f32(2, 5), panels=PANELS, in_features=5, out_features=3,
                                bias=None)),
    "cached_attention": built(dict(query=f32(2, 4, 3, 5), keys=f32(2, 2, 7, 5),
                                   values=f32(2, 2, 7, 6), mask=None, scale=None, soft_cap=None)),
    "norm_qkv_rope": weighted(
        ["qkv"], 2, [(8, 5), (4, 5), (4, 5)], x=f32(2, 3, 5), norm=f32(5), cos=f32(2, 3, 4),
        sin=f32(2, 3, 4), biases=[], head_norms=[], epsilon=1e-5,
    ),
    "output_norm_mlp": weighted(
        ["output", "mlp"], 3, [(5, 8), (7, 5), (7, 5), (5, 7)], attended=f32(2, 3, 8),
        residual=f32(2, 3, 5), norm=f32(5), output_bias=None, biases=[], epsilon=1e-5,
    ),
}  # fmt: skip


def _build(op):
    def build(changed=None, **bad):
        args = list(MAKE[op](**bad))
        for name, value in (changed or {}).items():
            args[arguments_of(op).index(name)] = value
        return tuple(args)

    return build


BUILD = {op: _build(op) for op in MAKE}

# Valid calls, and what their arguments must be. A tensor has its shape (its sizes in the last
# brackets; a letter may be any size) and its dtypes, a number its range. A list is known by its
# last tensor.
ROWS, IDS, F32 = "float32, bfloat16 or float16", "int32 or int64", "float32"
VECTOR, RATES = ("[3]", IDS), ("[3]", F32)
PARAMETERS = dict(temperature="finite and at least 0", top_p="in (0, 1]", min_p="in [0, 1]")
PARAMETERS["top_k"] = "at least 0 (0 keeps every token)"
TENSORS = dict(temperature=f32(3), top_k=i32(3), top_p=f32(3) + 1, min_p=f32(3))
SAMPLING = [
    ({}, dict(seeds=VECTOR, positions=VECTOR, **PARAMETERS)),
    (TENSORS, dict(temperatures=RATES, top_ks=("[3]", "int32"), top_ps=RATES, min_ps=RATES)),
]
SAMPLED = dict(draft=Q, sampled=(f64(3, 4), f32(3, 4), f32(3)))
TYPICAL = dict(typical_epsilon="in [0, 1]", typical_delta="finite and at least 0")


def words(of, sizes):
    return f"have the dimensions of {of} with ceil(V/32) words in the last one, [{sizes}, 1]"


def verification(n):
    """What both verifiers have; n: the sizes that their messages name for tokens."""
    rows = f"{n[:-1]}, D] = [3, 4, D]"
    return [
        *SAMPLING,
        (RAGGED, dict(target_indptr=("[4]", IDS))),
        (dict(draft=Q), dict(draft=(rows, ROWS), kind="in [0, 1]", **TYPICAL)),
        (SAMPLED, dict(draft_logsumexp=(f"{n} = [3, 4]", "float64"), draft_temperatures=RATES,
                       draft_threshold=(f"{n} = [3, 4]", F32))),
        (dict(sampled=(None, None, 1.0)), dict(draft_temperature=PARAMETERS["temperature"])),
        (SPARSE, dict(draft=(f"{n[:-1]}, K] = [3, 4, K]", ROWS),
                      draft_ids=("have the shape of the draft probabilities, [3, 4, 2]", IDS))),
        (dict(draft=Q, columns=i32(7)), dict(draft_columns=("[7]", "int32"))),
        (dict(bitmask=i32(3, 5, 1)), dict(token_bitmask=(words("target", "3, 5"), "int32"))),
        (SAMPLED | dict(draft_bitmask=i32(3, 4, 1)),
         dict(draft_bitmask=(words("draft logits", "3, 4"), "int32"))),
        (dict(draft=Q, draft_rows=i32(3, 4)), dict(draft_rows=(f"{n} = [3, 4]", IDS))),
        (dict(eos_token_ids=i64(2), max_new_tokens=i64(3)),
         dict(eos_token_ids=("[E]", IDS), max_new_tokens=VECTOR)),
    ]  # fmt: skip


CACHE, WINDOW = ("[B, H, S, D] with B = 3", ""), dict(caches=[f32(3, 2, 5, 4), f32(3, 2, 6, 4)])
TWO_POOLS = [f32(7, 4, 2, 8), f32(7, 4, 3, 8)]
POOLS = ("[num_blocks, block_size, H, D] = [7, 4, H, D]", "")
TABLES = ("[B, M] with B = 3", IDS)
LENGTHS = dict(lengths=("[B]", IDS), new_lengths=VECTOR)
PATHS = dict(base=("[B]", IDS), path=("[B, P] with B = 3", IDS))
SIZE, EPSILON = "in [0, 2147483647]", "finite and at least 0"
CALLS = {
    "sample": [
        *SAMPLING,
        ({}, dict(logits=("[R, V]", ROWS), noise="in [0, 2]", method="in [0, 1]")),
        (dict(bitmask=i32(3, 1)), dict(token_bitmask=(words("logits", "3"), "int32"))),
    ],
    "kept_tokens": [
        *((given, {name: rule for name, rule in rules.items() if rule != VECTOR})
          for given, rules in SAMPLING),
        ({}, dict(target=(None, ROWS), kind="in [0, 1]", max_kept="in [1, 1024]")),
        (dict(rows=i64(3, 2)), dict(rows=("[B, E] = [3, E]", IDS))),
        (dict(target=f32(9, 7), rows=i64(3, 2), target_indptr=i64(4)),
         dict(target_indptr=(None, IDS))),
        (dict(bitmask=i32(3, 5, 1)), dict(token_bitmask=(words("target", "3, 5"), "int32"))),
    ],
    "verify_chain": [
        *verification("[B, gamma]"),
        ({}, dict(target=("[B, gamma+1, V] = [3, 5, V]", ROWS), rule=f"in [0, {len(RULES) - 1}]",
                  draft_token_ids=("[B, gamma]", IDS), lenience="in (0, 1]",
                  top_beta_rank="at least 1", top_beta_distance="at least 0")),
        (dict(rule="synthetic", rates=f32(4)), dict(synthetic_rates=("[4]", F32))),
        (dict(uniforms=f64(3, 5)), dict(uniforms=("[B, gamma+1] = [3, 5]", "float64"))),
    ],
    "verify_tree": [
        *verification("[B, N]"),
        ({}, dict(target=("[B, N+1, V] = [3, 5, V]", ROWS), rule=f"in [0, {len(TREE_RULES) - 1}]",
                  tree_tokens=("[B, N]", IDS), parents=("[B, N] = [3, 4]", IDS),
                  max_depth="in [0, N] = [0, 4]")),
        (dict(uniforms=f64(3, 9)), dict(uniforms=("[B, 2N+1] = [3, 9]", "float64"))),
    ],
    "apply_penalties_": [
        ({}, dict(target=("[B, N+1, V] = [3, 5, V]", ROWS), draft_token_ids=("[B, N]", IDS),
                  repetition_penalty="finite and above 0", presence_penalty="finite",
                  frequency_penalty="finite")),
        (dict(parents=ROOTS, counts=i32(3, 7), prompt=i32(3, 1)),
         dict(parents=("[B, N] = [3, 4]", IDS), token_counts=("[B, V] = [3, 7]", "int32"),
              prompt_mask=("[B, ceil(V/32)] = [3, 1]", "int32"))),
        (dict(target=f32(9, 7), indptr=i64(4)), dict(target_indptr=("[4]", IDS))),
        (dict(rs=f32(3), ps=f32(3), fs=f32(3)),
         dict(repetition_penalties=RATES, presence_penalties=RATES, frequency_penalties=RATES)),
        (dict(ids=i64(3, 2), biases=f32(3, 2)),
         dict(bias_ids=("[B, K] = [3, K]", IDS), biases=("[B, K] = [3, 2]", F32))),
        (dict(least=i64(3), ends=i64(2)),
         dict(min_new_tokens=VECTOR, eos_token_ids=("[E]", IDS))),
    ],
    "kv_append_": [({}, dict(caches=CACHE, entries=CACHE, positions=("[B]", IDS)))],
    "kv_truncate_": [(WINDOW, dict(caches=CACHE, **LENGTHS))],
    "kv_compact_": [(WINDOW, dict(caches=CACHE, **PATHS))],
    "kv_realign_": [
        (WINDOW, dict(caches=CACHE, starts=("[B]", IDS), lengths=VECTOR, shifts=VECTOR)),
    ],
    "ring_truncate_": [(WINDOW, dict(caches=CACHE, window="at least 1", **LENGTHS))],
    "paged_append_": [
        (dict(entries=[f32(3, 1, 2, 8)]),
         dict(entries=("[B, n, H, D] = [3, n, 2, 8]", "float32 like its cache"),
              block_tables=TABLES, positions=("[B]", IDS), counts=VECTOR)),
        ({}, dict(caches=("[num_blocks, block_size, H, D]", ""))),
    ],
    "paged_compact_": [(dict(caches=TWO_POOLS), dict(caches=POOLS, block_tables=TABLES, **PATHS))],
    "paged_truncate_": [({}, dict(block_tables=TABLES, block_size="at least 1", **LENGTHS))],
    "tree_attention": [
        ({}, dict(parents=("[B, N]", IDS), lengths=VECTOR, slots="at least 0",
                  window="at least 0 (0 sees every key)")),
    ],
    "rerank_tree": [
        ({}, dict(tokens=("[B, M]", IDS), parents=("[B, M] = [3, 4]", IDS),
                  scores=("[B, M] = [3, 4]", F32), size=SIZE)),
    ],
    "build_trie": [({}, dict(sequences=("[B, K, L]", IDS), size=SIZE))],
    "expand_tree": [
        ({}, dict(logits=("[B, F, V]", ROWS), scores=("[B, F] = [3, 2]", F32),
                  width="in [1, 64]", temperature=PARAMETERS["temperature"])),
        (dict(temperatures=f32(3)), dict(temperatures=RATES)),
    ],
    "ngram_propose": [
        ({}, dict(history=("[B, L]", IDS), lengths=VECTOR, gamma=SIZE, min_ngram="at least 1",
                  max_ngram="at least min_ngram = 2")),
    ],
    "pack_linear": [({}, dict(weight=("[N, K]", ROWS)))],
    "pack_blocks": [({}, dict(blocks=("[N, bytes of a row], a multiple of 20", "uint8"),
                              format=f"in [1, {len(BLOCK_FORMATS)}]"))],
    "unpack_blocks": [({}, dict(panels=(None, "uint8"), in_features="at least 1",
                                out_features="at least 1"))],
    "packed_linear": [
        (dict(bias=f32(3)), dict(x=("[..., K] with K = 5", ROWS), panels=(None, F32),
                                 bias=("[3]", F32), out_features="at least 1")),
    ],
    "cached_attention": [
        (dict(mask=torch.ones(2, 1, 3, 7).bool()),
         dict(query=("[B, H, n, D]", ROWS), keys=("[B, H_kv, S, D] = [2, H_kv, S, 5]", F32),
              values=("[B, H_kv, S, D_v] = [2, 2, 7, D_v]", F32),
              mask=("[B, 1, n, S] = [2, 1, 3, 7]", "bool"))),
        (dict(scale=1.0, soft_cap=1.0), dict(scale="finite", soft_cap="finite and above 0")),
    ],
    "norm_qkv_rope": [
        (dict(biases=[f32(8), f32(4), f32(4)], head_norms=[f32(4)] * 2),
         dict(x=("[B, n, C]", ROWS), norm=(None, F32), cos=(None, F32),
              sin=("have the shape of cos, [2, 3, 4]", F32), biases=("[4]", F32),
              head_norms=("[4]", F32), epsilon=EPSILON, qkv=(None, F32))),
    ],
    "output_norm_mlp": [
        (dict(biases=[f32(7), f32(7), f32(5)], output_bias=f32(5)),
         dict(attended=("[B, n, A] = [2, 3, A]", F32), residual=("[B, n, C]", ROWS),
              norm=("[5]", F32), output=(None, F32), mlp=(None, F32), biases=("[5]", F32),
              output_bias=("[5]", F32), epsilon=EPSILON)),
    ],
}  # fmt: skip
LABELS = {
    "tree_tokens": "tree tokens", "draft_logsumexp": "draft logsumexp", "draft_ids": "draft ids",
    "draft_threshold": "draft threshold", "draft_columns": "draft_map columns",
    "draft_temperatures": "draft temperature", "draft_temperature": "draft temperature",
    "draft_bitmask": "draft token_bitmask", "repetition_penalties": "repetition_penalty",
    "presence_penalties": "presence_penalty", "frequency_penalties": "frequency_penalty",
    "temperatures": "temperature", "top_ks": "top_k", "top_ps": "top_p", "min_ps": "min_p",
}  # fmt: skip
CONTIGUOUS = {"logits", "target", "draft", "query", "keys", "values", "caches", "entries"}


def label_of(op, name, given, good):
    """The words by which a message names an argument."""
    label = LABELS.get(name, name)
    if (op, name) == ("verify_tree", "parents"):
        label = "tree parents"
    if name == "draft" and "ids" in given:
        label = "draft probabilities"
    return f"{label}[{len(good) - 1}]" if isinstance(good, list) else label


def other_shapes(shape, rule):
    """Shapes like this one that the rule excludes: more and fewer dimensions, and other sizes."""
    yield from ((1, *shape), shape[1:]) if "..." not in rule else ((*shape[:-1], shape[-1] + 1),)
    bound = dict(re.findall(r"(\w+) = (\d+)", rule.rpartition("]")[2]))
    sizes = re.findall(r"\[([^\[\]]*)\]", rule)[-1].split(", ")
    for i, size in enumerate(sizes):
        if size.isdigit() or size in bound:
            yield from ((*shape[:i], shape[i] + by, *shape[i + 1 :]) for by in (1, -1))


def beside(rule, whole):
    """Numbers that a range excludes: beside its ends, and what is no finite number."""
    ends = re.findall(r"[-\d.]+", rule.partition("=")[2] or rule.partition("(0 ")[0])
    if rule.startswith("in"):
        (low, high), (opens, closes) = map(float, ends), (rule[3], rule[-1])
        step = 1 if whole else 0.5
        wrong = [low - (step if opens == "[" else 0), high + (step if closes == "]" else 0)]
    else:
        wrong = [float(ends[0]) - (1 if whole else 0 if "above" in rule else 0.5)] if ends else []
    if whole:
        return [int(x) for x in wrong]
    return [*wrong, math.nan, *([math.inf] if "finite" in rule else [])]


def rows_of(op, given, name, rule):
    """(argument, wrong value, message) of one declared argument."""
    good = BUILD[op](**given)[arguments_of(op).index(name)]
    label = label_of(op, name, given, good)
    if isinstance(rule, str):
        for x in beside(rule, isinstance(good, int)):
            yield x, f"{label} must be {rule}, got {x:g}" if isinstance(x, float) else (
                f"{label} must be {rule}, got {x}")  # fmt: skip
        return
    shape_rule, dtypes = rule
    tensor = good[-1] if isinstance(good, list) else good
    wrong = []
    if shape_rule:
        must = shape_rule if shape_rule.startswith("have") else f"be {shape_rule}"
        for shape in other_shapes(tuple(tensor.shape), shape_rule):
            same = len(shape) == tensor.dim()
            if (op, name) == ("verify_tree", "draft") and len(shape) < tensor.dim():
                continue  # its rows may be one list for all trees
            words = must if same or name != "caches" else must.partition(" = [")[0]
            wrong.append((tensor.new_zeros(shape), f"must {words}, got {shown(shape)}"))
    for dtype in (torch.int16, torch.int64, torch.float32, torch.float64) if dtypes else ():
        text = str(dtype)[6:]
        if text not in re.findall(r"\w+", dtypes):
            wrong.append((tensor.to(dtype), f"must be {dtypes}, got {text}"))
    if name in CONTIGUOUS and not (name == "draft" and "ids" in given):
        wrong.append((tensor.mT.contiguous().mT, f"must have a contiguous last dimension, got "
                      f"stride {tensor.shape[-2]}"))  # fmt: skip
    for x, message in wrong:
        yield [*good[:-1], x] if isinstance(good, list) else x, f"{label} {message}"


def declared(op):
    """Rows of TABLE that follow from what the arguments of an op must be."""
    for given, rules in CALLS[op]:
        for name, rule in rules.items():
            for value, message in rows_of(op, given, name, rule):
                yield op, dict(given, changed={name: value}), re.escape(message)


# The argument on whose device the others must be, where it is not the first tensor.
DEVICE_OF = {
    "output_norm_mlp": "residual", "paged_append_": "positions", "paged_compact_": "base",
    "paged_truncate_": "lengths",
}  # fmt: skip


def devices(op):
    """(a call, an argument, message): with this argument on another device than the others."""
    for given, names in CALLS[op]:
        args = dict(zip(arguments_of(op), BUILD[op](**given), strict=True))
        first = next(n for n, x in args.items() if isinstance(x, torch.Tensor))
        first = DEVICE_OF.get(op, first)
        for name in names:
            if name != first and isinstance(args[name], (torch.Tensor, list)):
                good = args[name][:1] if isinstance(args[name], list) else args[name]
                label = re.escape(label_of(op, name, given, good))
                where = f"(positions or )?{first}( or lengths)?"
                yield given, name, f"{label} must be on the device of {where}, meta, got cpu"


TABLE = [
    *(row for op in CALLS for row in declared(op)),
    *((op, bad, re.escape(message)) for op, rows in SPECIAL.items() for bad, message in rows),
]


def message_of(op, args):
    """The first line of the error that a call raises."""
    try:
        op(*args)
    except (RuntimeError, ValueError) as error:
        return str(error).strip().splitlines()[0]
    return "no error"


# Valid calls of the public functions, with every tensor, list and record that they must have.
ONE, THREE, PAIR = i64(1), f32(1, 2, 7), f32(1, 2, 2)
SLOTS, SQUARE = f32(1, 1, 2, 1), pack_linear(f32(2, 2))
CUT_ONE, PATH_ONE = dict(lengths=ONE, new_lengths=ONE), dict(base=ONE, path=i64(1, 1))
BIASES = [f32(2)] * 3
LAYER = PackedDecoderLayer(BIASES[:2], [SQUARE] * 3, SQUARE, [SQUARE] * 3, 0.5, 1.0)
OF_PAIRS = PackedDecoderLayer(
    [f32(2, 2), f32(2)], [pack_linear(f32(2, 4))] * 3, SQUARE, [SQUARE] * 3, 0.5, 1.0
)
HEAD = PackedHead(PackedDecoderLayers([OF_PAIRS]), f32(5, 2), f32(2), SQUARE, i64(2))
GOOD = {
    "sample": dict(logits=f32(1, 7), seeds=ONE, positions=ONE),
    "verify_chain": dict(target=THREE, draft_token_ids=i64(1, 1), seeds=ONE, positions=ONE),
    "verify_tree": dict(target=THREE, tree=Tree(i64(1, 1), i64(1, 1) - 1), seeds=ONE,
                        positions=ONE, rule="greedy"),
    "kept_tokens": dict(target=THREE, max_kept=1),
    "apply_penalties_": dict(target=THREE, draft_token_ids=i64(1, 1)),
    "kv_append_": dict(caches=[SLOTS], entries=[SLOTS], positions=ONE),
    "kv_truncate_": dict(caches=[SLOTS], **CUT_ONE),
    "kv_compact_": dict(caches=[SLOTS], **PATH_ONE),
    "kv_realign_": dict(caches=[SLOTS], starts=ONE, lengths=ONE, shifts=ONE),
    "ring_truncate_": dict(caches=[SLOTS], window=1, **CUT_ONE),
    "state_select_": dict(states=[SLOTS], index=ONE),
    "paged_append_": dict(caches=[SLOTS], entries=[SLOTS], block_tables=i32(1, 1), positions=ONE),
    "paged_compact_": dict(caches=[SLOTS], block_tables=i32(1, 1), **PATH_ONE),
    "paged_truncate_": dict(block_tables=i32(1, 1), block_size=1, **CUT_ONE),
    "tree_attention": dict(parents=i64(1, 1), lengths=ONE, slots=3),
    "rerank_tree": dict(tokens=i64(1, 1), parents=i64(1, 1), scores=f32(1, 1), size=1),
    "build_trie": dict(sequences=i64(1, 1, 1)),
    "expand_tree": dict(logits=f32(1, 1, 7), scores=f32(1, 1), width=1),
    "ngram_propose": dict(history=i64(1, 1), lengths=ONE, gamma=1),
    "pack_linear": dict(weight=f32(3, 2)),
    "pack_blocks": dict(blocks=Q4_1, format="Q4_1"),
    "unpack_blocks": dict(packed=pack_blocks(Q4_1, "Q4_1")),
    "packed_linear": dict(x=f32(1, 2), packed=SQUARE),
    "cached_attention": dict.fromkeys(("query", "keys", "values"), f32(1, 1, 2, 3)),
    "norm_qkv_rope": dict(x=PAIR, norm=f32(2), qkv=[SQUARE] * 3, cos=PAIR, sin=PAIR, epsilon=0.5,
                          biases=BIASES, head_norms=BIASES[:2]),
    "output_norm_mlp": dict(attended=PAIR, residual=PAIR, norm=f32(2), output=SQUARE,
                            mlp=[SQUARE] * 3, epsilon=0.5, biases=BIASES),
    "decoder_layers_": dict(
        x=PAIR, layers=PackedDecoderLayers([LAYER]),
        cos=PAIR, sin=PAIR, caches=[f32(1, 1, 4, 2), f32(1, 1, 4, 2)], positions=ONE,
        mask=torch.ones(1, 1, 2, 3, dtype=torch.bool),
    ),
    "grow_tree_": dict(
        hidden=PAIR, tokens=i64(1, 2), head=HEAD, cos=f32(9, 2), sin=f32(9, 2),
        caches=[f32(1, 1, 9, 2), f32(1, 1, 9, 2)], starts=ONE, counts=ONE + 1, limits=ONE + 1,
        width=2, size=3,
    ),
}  # fmt: skip
