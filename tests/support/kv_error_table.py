"""Bad inputs of the cache ops, as error_table.py has them for the other ops."""

import torch


def i64(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def f64(*shape):
    return torch.zeros(shape, dtype=torch.float64)


def cache(*size, dtype=torch.float32):
    return torch.zeros(size, dtype=dtype)


def changing(**good):
    """A function that gives good arguments, some of them changed."""
    return lambda **bad: tuple((good | bad).values())


def append_args(caches=None, entries=None, positions=None):
    caches = [cache(3, 2, 5, 4)] if caches is None else caches
    return (
        caches,
        [cache(3, 2, 1, 4) for _ in caches] if entries is None else entries,
        i64(3) if positions is None else positions,
    )


def paged_append_args(caches=None, entries=None, tables=None, positions=None, counts=None):
    caches = [cache(7, 4, 2, 8)] if caches is None else caches
    return (
        caches,
        [c.new_empty(3, 1, *c.shape[-2:]) for c in caches] if entries is None else entries,
        i64(3, 2).int() if tables is None else tables,
        i64(3) if positions is None else positions,
        i64(3) if counts is None else counts,
    )


CACHES = [  # rows of every op on [B, H, S, D]
    (dict(caches=[cache(3, 5, 4)]),
     r"caches\[0\] must be \[B, H, S, D\] with B = 3, got \[3, 5, 4\]"),
    (dict(caches=[cache(3, 2, 5, 4), cache(2, 2, 5, 4)]),
     r"caches\[1\] must be \[B, H, S, D\] with B = 3, got \[2, 2, 5, 4\]"),
    (dict(caches=[cache(3, 2, 4, 5).mT]),
     r"caches\[0\] must have a contiguous last dimension, got stride 5"),
]  # fmt: skip
SAME = cache(3, 2, 5, 4)
WRITTEN = [  # rows of every op that moves tokens
    (dict(caches=[cache(3, 2, 5, 4), SAME, SAME]),
     r"caches\[2\] must not overlap caches\[1\], because both are written in place"),
    (dict(caches=[cache(3, 1, 5, 4).expand(3, 2, 5, 4)]),
     r"caches\[0\] must not be expanded, because it is written in place, "
     "got stride 0 in dimension 1"),
]  # fmt: skip
ENTRIES = [
    (dict(positions=i64(3, 1)), r"positions must be \[B\], got \[3, 1\]"),
    (dict(positions=i64(3).short()), "positions must be int32 or int64, got int16"),
    (dict(caches=[cache(3, 2, 5, 4)] * 2, entries=[cache(3, 2, 1, 4)]),
     "entries must have one tensor for each of the 2 caches, got 1"),
    (dict(entries=[cache(1, 2, 1, 4)]),
     r"entries\[0\] must be \[B, H, S, D\] with B = 3, got \[1, 2, 1, 4\]"),
    (dict(entries=[cache(3, 2, 4, 5).mT]),
     r"entries\[0\] must have a contiguous last dimension, got stride 5"),
    (dict(caches=[cache(3, 2, 5, 4), cache(3, 1, 5, 4)]),
     r"entries\[1\] must be \[B, H, n, D\] = \[3, 1, n, 4\], got \[3, 2, 1, 4\]"),
    (dict(entries=[cache(3, 2, 1, 5)]),
     r"entries\[0\] must be \[B, H, n, D\] = \[3, 2, n, 4\], got \[3, 2, 1, 5\]"),
    (dict(caches=[cache(3, 2, 5, 4, dtype=torch.float8_e4m3fn)],
          entries=[cache(3, 2, 1, 4, dtype=torch.bfloat16)]),
     r"entries\[0\] must be float8_e4m3fn like its cache, got bfloat16"),
]  # fmt: skip
PAGED_ENTRIES = [
    *ENTRIES[:3],
    (dict(entries=[cache(1, 1, 2, 8)]),
     r"entries\[0\] must be \[B, n, H, D\] = \[3, n, 2, 8\], got \[1, 1, 2, 8\]"),
    (dict(entries=[cache(3, 1, 2, 7)]),
     r"entries\[0\] must be \[B, n, H, D\] = \[3, n, 2, 8\], got \[3, 1, 2, 7\]"),
    (dict(entries=[cache(3, 1, 8, 2).mT]),
     r"entries\[0\] must have a contiguous last dimension, got stride 2"),
    (dict(entries=[f64(3, 1, 2, 8)]), r"entries\[0\] must be float32 like its cache, got float64"),
    (dict(counts=i64(2)), r"counts must be \[3\], got \[2\]"),
    (dict(counts=f64(3)), "counts must be int32 or int64, got float64"),
]  # fmt: skip
EXPANDED = (
    dict(lengths=i64(1).expand(3)),
    "lengths must not be expanded, because it is written in place, got stride 0 in dimension 0",
)
PATHS = [
    (dict(base=i64(3, 1)), r"base must be \[B\], got \[3, 1\]"),
    (dict(base=i64(3).short()), "base must be int32 or int64, got int16"),
    (dict(path=i64(3)), r"path must be \[B, P\] with B = 3, got \[3\]"),
    (dict(path=i64(2, 2)), r"path must be \[B, P\] with B = 3, got \[2, 2\]"),
    (dict(path=f64(3, 2)), "path must be int32 or int64, got float64"),
]
TABLES = [
    (dict(tables=i64(3).int()), r"block_tables must be \[B, M\] with B = 3, got \[3\]"),
    (dict(tables=i64(4, 2).int()), r"block_tables must be \[B, M\] with B = 3, got \[4, 2\]"),
    (dict(tables=f64(3, 2)), "block_tables must be int32 or int64, got float64"),
]
PAGED = [
    (dict(caches=[cache(7, 4, 8)]),
     r"caches\[0\] must be \[num_blocks, block_size, H, D\], got \[7, 4, 8\]"),
    (dict(caches=[cache(7, 4, 2, 8), cache(7, 3, 2, 8)]),
     r"caches\[1\] must be \[num_blocks, block_size, H, D\] = \[7, 4, H, D\], "
     r"got \[7, 3, 2, 8\]"),
    (dict(caches=[cache(7, 4, 8, 2).mT]),
     r"caches\[0\] must have a contiguous last dimension, got stride 2"),
]  # fmt: skip
CUTS = [
    (dict(lengths=i64(3, 1)), r"lengths must be \[B\], got \[3, 1\]"),
    (dict(lengths=i64(3).short()), "lengths must be int32 or int64, got int16"),
    (dict(new_lengths=i64(2)), r"new_lengths must be \[3\], got \[2\]"),
    (dict(new_lengths=f64(3)), "new_lengths must be int32 or int64, got float64"),
    EXPANDED,
]
MOVES = [
    (dict(starts=i64(3, 1)), r"starts must be \[B\], got \[3, 1\]"),
    (dict(starts=f64(3)), "starts must be int32 or int64, got float64"),
    (dict(lengths=i64(2)), r"lengths must be \[3\], got \[2\]"),
    (dict(lengths=i64(3).short()), "lengths must be int32 or int64, got int16"),
    (dict(shifts=i64(4)), r"shifts must be \[3\], got \[4\]"),
    (dict(shifts=i64(3).short()), "shifts must be int32 or int64, got int16"),
]
WINDOWS = [
    (dict(window=0), "window must be at least 1, got 0"),
    (dict(caches=[cache(3, 2, 9, 4), cache(3, 2, 5, 4)], window=6),
     r"window must be at most the slots of caches\[1\], 5, got 6"),
]  # fmt: skip
SIZES = [
    (dict(block_size=0), "block_size must be at least 1, got 0"),
    (dict(tables=i64(3, 1).int().expand(3, 2)),
     "block_tables must not be expanded, because it is written in place, "
     "got stride 0 in dimension 1"),
]  # fmt: skip

OF_CACHES = dict(caches=[cache(3, 2, 5, 4)])
OF_TABLES = dict(tables=i64(3, 2).int())
OF_PATHS = dict(base=i64(3), path=i64(3, 2))
OF_CUTS = dict(lengths=i64(3), new_lengths=i64(3))
BUILD = {
    "kv_append_": append_args,
    "kv_truncate_": changing(**OF_CACHES, **OF_CUTS, zero_fill=True),
    "kv_compact_": changing(**OF_CACHES, **OF_PATHS),
    "paged_append_": paged_append_args,
    "paged_compact_": changing(caches=[cache(7, 4, 2, 8)], **OF_TABLES, **OF_PATHS),
    "paged_truncate_": changing(**OF_TABLES, **OF_CUTS, block_size=4),
    "kv_realign_": changing(
        **OF_CACHES, starts=i64(3), lengths=i64(3), shifts=i64(3), zero_fill=False
    ),
    "ring_truncate_": changing(**OF_CACHES, **OF_CUTS, window=5, zero_fill=True),
}
ROWS = {
    "kv_append_": [*ENTRIES, *CACHES, *WRITTEN],
    "kv_truncate_": [*CUTS, *CACHES],
    "kv_compact_": [*PATHS, *CACHES, *WRITTEN],
    "paged_append_": [*PAGED_ENTRIES, *TABLES, *PAGED, *WRITTEN],
    "paged_compact_": [*PATHS, *TABLES, *PAGED, *WRITTEN],
    "paged_truncate_": [*CUTS, *TABLES, *SIZES],
    "kv_realign_": [*MOVES, *CACHES, *WRITTEN],
    "ring_truncate_": [*CUTS, *CACHES, *WINDOWS],
}

# (op, the argument that stays on the CPU, what else to change, the start of the message)
DEVICES = [
    ("kv_compact_", "path", {}, "path must be on the device of base"),
    ("kv_compact_", "caches", {}, "caches[0] must be on the device of base"),
    ("paged_append_", "counts", {}, "counts must be on the device of positions"),
    ("paged_append_", "entries", {}, "entries[0] must be on the device of positions"),
    ("paged_compact_", "block_tables", {}, "block_tables must be on the device of base"),
    ("paged_compact_", "caches", {}, "caches[0] must be on the device of base"),
    ("paged_truncate_", "block_tables", {}, "block_tables must be on the device of lengths"),
    ("kv_realign_", "shifts", {}, "shifts must be on the device of starts"),
    ("ring_truncate_", "caches", {}, "caches[0] must be on the device of lengths"),
]

# Arguments of the public functions that raise nothing.
ONE, CACHE, TABLE = i64(1), cache(1, 1, 2, 1), i64(1, 1).int()
GOOD = {
    "kv_append_": dict(caches=[CACHE], entries=[CACHE], positions=ONE),
    "kv_truncate_": dict(caches=[CACHE], lengths=ONE, new_lengths=ONE),
    "kv_compact_": dict(caches=[CACHE], base=ONE, path=i64(1, 1)),
    "kv_realign_": dict(caches=[CACHE], starts=ONE, lengths=ONE, shifts=ONE),
    "ring_truncate_": dict(caches=[CACHE], lengths=ONE, new_lengths=ONE, window=1),
    "state_select_": dict(states=[CACHE], index=ONE),
    "paged_append_": dict(caches=[CACHE], entries=[CACHE], block_tables=TABLE, positions=ONE),
    "paged_compact_": dict(caches=[CACHE], block_tables=TABLE, base=ONE, path=i64(1, 1)),
    "paged_truncate_": dict(block_tables=TABLE, lengths=ONE, new_lengths=ONE, block_size=1),
}
