"""Cases of `ngram_propose`."""

from __future__ import annotations

import torch
from torch import Generator

from proofs.case import Args, Case, spaced, spread

i32, i64 = torch.int32, torch.int64


def ngram_case(
    b, columns, gamma, dtype=i64, *, ids=3, ngrams=(4, 2), lengths="ragged", layout="dense"
) -> Case:
    """A case of `ngram_propose` on texts of few distinct ids.

    ngrams: max_ngram and min_ngram.
    lengths: "ragged" (random), "full" (all columns) or "faulty" (some out of range). The columns
        after a length hold tokens like those before it.
    """

    def build(g: Generator) -> Args:
        history = torch.randint(0, ids, (b, columns), generator=g).to(dtype)
        known = torch.randint(0, columns + 1, (b,), generator=g)
        if lengths == "full":
            known[:] = columns
        if lengths == "faulty":
            bad = torch.tensor([-1, columns + 1, -(2**63), 2**63 - 1, 2**32])
            known[: len(bad)] = bad[:b]
        if layout == "sliced":
            known = spaced(known)
        return spread(history, layout), known, gamma, *ngrams

    words = [f"B{b}", f"L{columns}", f"g{gamma}", str(dtype)[6:], f"V{ids}", lengths, layout]
    return Case("ngram_propose", "-".join([*words, *(f"n{n}" for n in ngrams)]), build)


CASES: tuple[Case, ...] = (
    ngram_case(5, 37, 5), ngram_case(5, 37, 5, i32, layout="sliced"),
    ngram_case(4, 23, 7, i32, ids=2, layout="transposed"),
    ngram_case(4, 23, 7, ids=2, ngrams=(1, 1)), ngram_case(7, 19, 3, ids=2, lengths="faulty"),
    ngram_case(3, 31, 40, ids=2, ngrams=(9, 3)),
    ngram_case(3, 29, 1, ids=1, lengths="full", ngrams=(2**62, 1)),
    ngram_case(3, 29, 6, i32, ids=10**6, ngrams=(3, 1)), ngram_case(0, 9, 4), ngram_case(3, 0, 4),
    ngram_case(3, 9, 0, ids=2, lengths="full"), ngram_case(4, 1, 4, ngrams=(1, 1), lengths="full"),
    ngram_case(4, 2, 2, ids=1, ngrams=(3, 1)), ngram_case(3, 4099, 17, lengths="full"),
    ngram_case(3, 2500, 1100, i32, ids=2, ngrams=(30, 3)),
)  # fmt: skip
