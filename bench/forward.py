"""Times what a forward of few tokens consists of: the linear layers of a model, and its attention.

    python -m bench.forward [--model smollm2|1b] [--dtype D] [--threads T] [--widths 1,8]
        [--rounds N] [--save FILE.json]
    python -m bench.forward --part attention [--dtype D] [--threads T] [--widths 1,2,4,8,12]

Every layer of a model runs once a pass, in order, so that no weight is in a cache; the weights are
random. `floor` is the time of reading as many bytes, measured between the passes. Each figure is
the least of all rounds, in which all of them take turns; PyTorch takes more than one row once only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

import specdec_kernels as sk
from bench.measure import seconds
from bench.results import machine, processor
from specdec_kernels.arguments.weight_blocks import FORMATS, BlockFormat


def shapes(
    hidden: int, kv: int, intermediate: int, layers: int, vocabulary: int
) -> list[tuple[int, int]]:
    """[N, K] of the linear layers of a Llama; `kv` is the size of the keys of a token."""
    attention = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    mlp = [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
    return (attention + mlp) * layers + [(vocabulary, hidden)]


MODELS = {
    "smollm2": shapes(576, 192, 1536, 30, 49152),  # SmolLM2-135M
    "1b": shapes(2048, 512, 8192, 16, 32000),  # 1.04 B weights
}
MODEL_DTYPES = {"smollm2": ["float32", "bfloat16", "Q4_1", "Q8_0"], "1b": ["bfloat16", "Q4_K"]}
WIDTHS = "1,2,4,8,16,64"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
console = Console(highlight=False, width=120)
Passes = dict[str, Callable[[dict[int, Tensor]], object]]


def blocks_of(n: int, k: int, kind: BlockFormat) -> sk.PackedLinear:
    """A packed weight [N, K] of random blocks, whose scales are about 0.01."""
    blocks = torch.randint(256, (n, k // kind.inputs, kind.file_bytes), dtype=torch.uint8)
    halves = torch.full((2,), 0.01, dtype=torch.float16).view(torch.uint8)
    blocks[..., :4] = halves
    if kind.name == "Q6_K":
        blocks[..., -2:] = halves[:2]
    return sk.pack_blocks(blocks.flatten(1), kind.name)


def passes(model: str, kind: str) -> tuple[Passes, int]:
    """For each peer a pass through all layers, which takes the rows by their number of inputs.

    Also the bytes of the packed weights. kind: of the weights, a dtype or a format of blocks, whose
    peers multiply by the same numbers in float32.
    """
    dtype = DTYPES.get(kind, torch.float32)
    if kind in DTYPES:
        weights = [torch.randn(shape).to(dtype) for shape in MODELS[model]]
        packed = [sk.pack_linear(weight) for weight in weights]
    else:
        (format_,) = [f for f in FORMATS if f.name == kind]
        packed = [blocks_of(n, k, format_) for n, k in MODELS[model]]
        weights = [sk.unpack_blocks(weight) for weight in packed]
    size = sum(weight.panels.nbytes for weight in packed)

    def ours(rows: dict[int, Tensor]) -> None:
        for layer in packed:
            sk.packed_linear(rows[layer.in_features], layer)

    def eager(rows: dict[int, Tensor]) -> None:
        for weight in weights:
            linear(rows[weight.shape[1]], weight)

    found: Passes = {"ours": ours, "eager": eager}
    try:
        blocked = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in weights]
    except RuntimeError as error:
        console.print(f"oneDNN packs no {dtype} here: {error}")
        return found, size
    inputs = [k for _, k in MODELS[model]]

    def onednn(rows: dict[int, Tensor]) -> None:
        for weight, k in zip(blocked, inputs, strict=True):
            torch.ops.mkldnn._linear_pointwise(rows[k], weight, None, "none", [], "")

    return found | {"oneDNN packed": onednn}, size


def measure_linear(model: str, kind: str, widths: list[int], rounds: int) -> dict[str, list[float]]:
    """Print milliseconds of a pass by number of rows, and return them by peer."""
    peers, size = passes(model, kind)
    dtype = DTYPES.get(kind, torch.float32)
    read = torch.zeros(size // 4)
    sizes = {k for _, k in MODELS[model]}
    rows = {m: {k: torch.randn(m, k).to(dtype) for k in sizes} for m in widths}
    best: dict[tuple[str, int], float] = {}
    peers |= {"floor": lambda rows: read.sum()}
    for _ in range(rounds):
        for m in widths:
            for name, run in peers.items():
                # PyTorch takes 100 times as long for many rows of bfloat16 as for one.
                if (name, m) in best and name == "eager" and m > 1:
                    continue
                took = seconds(partial(run, rows[m]))
                best[name, m] = min(took * 1e3, best.get((name, m), took * 1e3))
    title = (
        f"linear layers of {model}, {kind}, {size / 1e6:.0f} MB, {torch.get_num_threads()} threads"
    )
    table = Table("rows", *(f"{name}, ms" for name in peers), title=title)
    for ratio in ("ours / floor", "ours / one row", "ours, GB/s"):
        table.add_column(ratio)
    floor = min(best["floor", m] for m in widths)
    for m in widths:
        times = [f"{best[name, m]:.1f}" for name in peers]
        ratios = best["ours", m] / floor, best["ours", m] / best["ours", widths[0]]
        speed = size / best["ours", m] / 1e6
        table.add_row(str(m), *times, *(f"{r:.2f}" for r in ratios), f"{speed:.1f}")
    console.print(table)
    return {name: [round(best[name, m], 2) for m in widths] for name in peers}


LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 30, 9, 3, 64
SLOTS = (100, 500, 2000)


def grouped_sdpa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """PyTorch's attention, with the queries of a group of heads as rows of one head."""
    batch, heads, n, size = query.shape
    groups = heads // keys.shape[1]
    out = scaled_dot_product_attention(
        query.reshape(batch, keys.shape[1], groups * n, size), keys, values,
        attn_mask=mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3),
    )  # fmt: skip
    return out.reshape(batch, heads, n, size).transpose(1, 2).contiguous()


def measure_attention(dtype: torch.dtype, widths: list[int], rounds: int) -> None:
    """Print microseconds of the attention of one layer by slots and number of queries."""
    peers = {"ours": sk.cached_attention, "grouped sdpa": grouped_sdpa}
    title = f"attention, {str(dtype)[6:]}, {torch.get_num_threads()} threads"
    table = Table("slots", "queries", *(f"{name}, us" for name in (*peers, "floor")), title=title)
    for ratio in ("ours / floor", "sdpa / ours"):
        table.add_column(ratio)
    size = (1, KV_HEADS, max(SLOTS), HEAD_SIZE)
    caches = [[torch.randn(size).to(dtype) for _ in range(2)] for _ in range(LAYERS)]
    for slots in SLOTS:
        views = [[x[:, :, :slots] for x in cache] for cache in caches]
        read = torch.zeros(LAYERS * 2 * KV_HEADS * slots * HEAD_SIZE * dtype.itemsize // 4)
        for n in widths:
            query = torch.randn(1, n, HEADS, HEAD_SIZE).to(dtype).transpose(1, 2)
            mask = torch.arange(slots) <= slots - n + torch.arange(n)[:, None]
            # The least of each layer: a pass takes so long that other processes interrupt most.
            best: dict[tuple[str, int], float] = {}
            for _ in range(rounds):
                for name, attend in peers.items():
                    for i, cache in enumerate(views):
                        took = seconds(partial(attend, query, *cache, mask[None, None]))
                        best[name, i] = min(took, best.get((name, i), took))
                took = seconds(partial(torch.sum, read))
                best["floor", 0] = min(took, best.get(("floor", 0), took))
            times = {
                name: sum(took for (peer, _), took in best.items() if peer == name) / LAYERS
                for name in (*peers, "floor")
            }
            ratios = times["ours"] / times["floor"], times["grouped sdpa"] / times["ours"]
            table.add_row(
                str(slots), str(n), *(f"{t * 1e6:.0f}" for t in times.values()),
                *(f"{r:.2f}" for r in ratios),
            )  # fmt: skip
    console.print(table)


def main(
    part: Annotated[str, typer.Option(help="linear, attention")] = "linear",
    model: Annotated[str, typer.Option(help=", ".join(MODELS))] = "smollm2",
    dtype: Annotated[
        list[str] | None, typer.Option(help="or a format of blocks; by default those of the model")
    ] = None,
    threads: Annotated[list[int] | None, typer.Option(help="by default 2")] = None,
    widths: Annotated[str, typer.Option(help="numbers of rows or queries")] = WIDTHS,
    rounds: Annotated[int, typer.Option(help="passes of each peer and width")] = 7,
    save: Annotated[Path | None, typer.Option(help="a JSON file for those of linear")] = None,
) -> None:
    """Measure a part of a forward, each dtype with each number of threads."""
    console.print(f"{processor()}, {sk.cpu_capability()}, torch {torch.__version__}")
    rows = [int(m) for m in widths.split(",")]
    found: list[dict[str, Any]] = []
    for d in dtype or MODEL_DTYPES[model]:
        for number in threads or [2]:
            torch.set_num_threads(number)
            if part == "attention":
                measure_attention(DTYPES[d], rows, rounds)
                continue
            ms = measure_linear(model, d, rows, rounds)
            found.append({"dtype": d, "threads": number, "rows": rows, "ms": ms})
    if save is not None:
        done = {"machine": machine("cpu") | {"op": "packed_linear"}, "model": model, "runs": found}
        save.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
