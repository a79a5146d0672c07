"""The status of a sequence: one bit for each kind of fault in its data."""

from __future__ import annotations

from enum import IntFlag


class Status(IntFlag):
    """Faults in the data of a sequence or row: the bits in `status` of `sample` and the verifiers.

    Values in an array never raise. Tokens accepted before the fault are kept, and no id outside of
    the vocabulary is returned.

    TARGET_INVALID: a target row holds no distribution, or a ragged target has no row for the
        sequence. No token is emitted at its position: -1.
    DRAFT_INVALID: a draft row holds no distribution. Its draft is treated as absent (-1).
    EMPTY_RESIDUAL: a draft was rejected, but max(P - Q, 0) is zero everywhere. The recovered token
        is sampled from the target distribution P.
    DRAFT_OUT_OF_RANGE: a drafted id is outside the vocabulary, or a parent outside the tree. The
        draft is treated as absent (-1).
    BAD_PARAMETER: a sampling parameter, the temperature of a `SampledDraft` or a value in
        `uniforms` is out of range. Nothing is emitted.

    >>> Status(5)
    <Status.TARGET_INVALID|EMPTY_RESIDUAL: 5>
    """

    TARGET_INVALID = 1
    DRAFT_INVALID = 2
    EMPTY_RESIDUAL = 4
    DRAFT_OUT_OF_RANGE = 8
    BAD_PARAMETER = 16
