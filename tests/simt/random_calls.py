"""Random calls of `sample` and the verifiers in the emulator, compared with the C++ kernels.

    PYTHONPATH=tests python tests/simt/random_calls.py --calls 3000 --seed 1
    PYTHONPATH=tests python tests/simt/random_calls.py --seed 1 --only 1234

Call number i of a seed is always the same. Each one runs on two devices of other sizes, with
random orders of threads and contents of the workspace. Both runs have to give the same bits, and
the tokens and status of the C++ kernels. How many calls emitted a token is printed by rule and
filter.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator

import torch
from fuzz.calls import MAKERS
from fuzz.checks import Recorder
from fuzz.values import Source
from proofs import OUTPUTS, assert_outputs_close, assert_outputs_equal
from simt import emulator
from support import shared_build

from specdec_kernels import Status
from specdec_kernels.arguments.rules import KINDS, METHODS, RULES, TREE_RULES

OPS = ("sample", "verify_chain", "verify_chain", "verify_chain", "verify_tree")
FILLS = (0, emulator.ALL_ONES, 70_000, 0x3F80_3F80_3F80_3F80)


def call(r: Source):
    """An op, its arguments, and what the C++ kernel returns."""
    made = MAKERS[r.choice(OPS)](r)
    arguments = made.arguments
    if "draft_map" in arguments and "tree" not in arguments and r.happens(0.4):
        arguments = of_ratio_tests(r, arguments)
    if arguments.get("uniforms") is not None:
        arguments = arguments | {"uniforms": off_the_ends(arguments["uniforms"])}
    if "top_p" in arguments:
        arguments = arguments | {"top_p": off_one(arguments["top_p"])}
    with Recorder() as recorder:
        made.function(**arguments)
    overload, args = recorder.calls[0]
    return overload, args, overload(*args)


def off_the_ends(uniforms: torch.Tensor) -> torch.Tensor:
    """Without those that draw the first or last token of any mass.

    CUDA cuts the mass of four or eight neighbours to multiples of 2^-48, C++ rounds to float32.
    """
    legal = (uniforms >= 0) & (uniforms < 1)
    return torch.where(legal, uniforms.clamp(2**-22, 1 - 2**-22), uniforms)


def off_one(top_p: float | torch.Tensor) -> float | torch.Tensor:
    """No 1 - 1e-7: whether so much of a row is left is a matter of rounding to float32."""
    if isinstance(top_p, torch.Tensor):
        return torch.where((top_p > 0.9999) & (top_p < 1), 0.999, top_p)
    return 0.999 if 0.9999 < top_p < 1 else top_p


OF_OTHER_RULES = {"typical_epsilon", "typical_delta", "top_beta_rank", "top_beta_distance"}


def of_ratio_tests(r: Source, arguments: dict) -> dict:
    """The call with the ratio test alone: most calls have a filter or a map."""
    draft = arguments["draft"]
    if isinstance(draft, torch.Tensor):
        draft = draft.to(arguments["target"].dtype)
    rule = r.choice(("token", "lenient", "greedy"))
    left_out = {"top_k", "top_p", "min_p", "synthetic_rates"} | OF_OTHER_RULES
    left_out |= {"temperature"} if r.happens(0.5) else set()
    left_out |= set() if rule == "lenient" else {"lenience"}
    kept = {name: value for name, value in arguments.items() if name not in left_out}
    return kept | {"rule": rule, "draft": draft, "draft_map": None}


def devices(r: Source) -> Iterator[dict]:
    """A device where one block reads a row, and another, each with a way to run."""
    for processors in (0, r.choice((1, 2, 7, 100))):
        yield {
            "processors": processors,
            "order": r.choice(list(emulator.ORDERS)),
            "fill": r.choice(FILLS),
        }


def features(op, given) -> Iterator[tuple[str, str]]:
    """What a call has, as (group, name)."""
    rows = given["logits" if op == "sample" else "target"]
    if op == "sample":
        yield "rule", f"sample {METHODS[given['method']]}"
    else:
        names = RULES if op == "verify_chain" else TREE_RULES
        yield "rule", f"{op.removeprefix('verify_')} {names[given['rule']]}"
        yield "kind", KINDS[given["kind"]]
        yield "draft", draft_form(given)
    off = True
    for name, neutral in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if given[name + "s"] is not None or given[name] != neutral:
            yield "filter", name
            off = False
    if off:
        yield "filter", "none"
    yield "warp tiles", "several" if rows.shape[-1] > 512 else "one"
    yield "dtype", str(rows.dtype).removeprefix("torch.")
    starts = {(rows.data_ptr() + i * rows.stride(-2) * rows.itemsize) % 16 for i in range(2)}
    yield "rows", "aligned to 16 bytes" if starts == {0} else "at odd addresses"


def draft_form(given) -> str:
    if given["draft_ids"] is not None:
        return "sparse"
    form = "none" if given["draft"] is None else "rows"
    form = form if given["draft_logsumexp"] is None else "sampled"
    return form if given["draft_columns"] is None else f"{form}, mapped"


def sums_beyond_float32(given) -> bool:
    """Whether a row of probabilities is one that C++ refuses and the other providers take.

    Its entries are finite, but no float32 holds their sum.
    """
    rows = given["target"] if given.get("kind") == KINDS.index("probs") else None
    largest = torch.finfo(torch.float32).max
    return rows is not None and bool((rows.double().nan_to_num(0, 0, 0).sum(-1) > largest).any())


def empty_as(op, want, got, reached):
    """`want`, with the bit EMPTY_RESIDUAL of `got` where that bit alone differs.

    Where P and Q agree to rounding, that decides whether a residual is empty. The token is the same
    where both have all mass on it; else the comparison fails by the tokens.
    """
    if op == "sample":
        return want
    at = OUTPUTS[op].index("status")
    other = (want[at] ^ got[at]) == Status.EMPTY_RESIDUAL
    reached["by rounding", "empty residual"] += int(other.sum())
    return (*want[:at], torch.where(other, got[at], want[at]), *want[at + 1 :])


def compare(simt, seed: int, i: int, reached: Counter) -> None:
    r = Source(seed, i)
    overload, args, want = call(r)
    op = overload._schema.name.split("::")[1]
    given = dict(zip((a.name for a in overload._schema.arguments), args, strict=True))
    reached["calls", op] += 1
    if sums_beyond_float32(given):
        reached["rows", "left out: sum beyond float32"] += 1
        return
    emitted = want[OUTPUTS[op].index("tokens")]
    first = None
    for device in devices(r):
        with simt.running(**device):
            got = simt.op(op)(*args)
        assert_outputs_close(op, got, empty_as(op, want, got, reached))
        if first is not None:
            assert_outputs_equal(op, got, first)
        first = got
    if not len(emitted):
        reached["rows", "empty batch"] += 1
    if bool((emitted >= 0).any()):
        reached.update(features(op, given))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of a single call")
    a = parser.parse_args()
    torch.set_num_threads(1)
    begin, failed, reached = time.perf_counter(), [], Counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault(shared_build.FOLDER, folder)
        simt = emulator.library()
    for i in range(a.calls) if a.only is None else (a.only,):
        try:
            compare(simt, a.seed, i, reached)
        except AssertionError as error:
            failed.append(i)
            print(f"call {i} of seed {a.seed}: {error}", flush=True)
        except KeyboardInterrupt:
            break
    for group in dict.fromkeys(group for group, _ in reached):
        counts = ((name, n) for (g, name), n in reached.most_common() if g == group)
        print(f"{group}: " + ", ".join(f"{name} {n}" for name, n in counts))
    took = time.perf_counter() - begin
    made = sum(n for (group, _), n in reached.items() if group == "calls")
    print(f"{len(failed)} of {made} calls differ, {took:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
