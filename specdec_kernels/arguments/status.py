"""The status of a sequence: one bit for each kind of fault in its data.

The file is a link in specdec_host too, so it must not import torch.
"""

from __future__ import annotations

from enum import IntFlag


class Status(IntFlag):
    """Faults in the data of a sequence or row: the bits in `status` of `sample` and the verifiers.

    Ops never raise for values in a tensor: to look at them would make the host wait for the device.
    They report a fault here, keep the tokens accepted before it and never return an id outside the
    vocabulary.

    TARGET_INVALID: a target row holds no distribution (NaN, +inf, or no finite logit), or a ragged
        target has no row for the sequence. No token is emitted at its position: -1.
    DRAFT_INVALID: a draft row holds no distribution. Its draft is treated as absent (-1).
    EMPTY_RESIDUAL: a draft was rejected, but max(P - Q, 0) is zero everywhere, by rounding or
        because Q is wrong. The recovered token is sampled from the target distribution P.
    DRAFT_OUT_OF_RANGE: a drafted id is outside the vocabulary, or a parent outside the tree. The
        draft is treated as absent (-1).
    BAD_PARAMETER: a sampling parameter, the temperature of a `SampledDraft` or a value in
        `uniforms` is out of range. Nothing is emitted.
    NOTHING_ALLOWED: `token_bitmask` allows no token of a target row. No token is emitted at its
        position: -1.
    KEPT_CUT: more tokens are kept in a row than the `max_kept` that `kept_tokens` returns.

    >>> Status(5)
    <Status.TARGET_INVALID|EMPTY_RESIDUAL: 5>
    """

    TARGET_INVALID = 1
    DRAFT_INVALID = 2
    EMPTY_RESIDUAL = 4
    DRAFT_OUT_OF_RANGE = 8
    BAD_PARAMETER = 16
    NOTHING_ALLOWED = 32
    KEPT_CUT = 64
