"""`specdec_kernels::sample` in Triton, with the kernels of `verify_chain`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...arguments.sample import STREAMS, SampleArguments
from .. import launch
from ..chain.sequence import MATCH, TOKEN, Call, Outputs, Target
from ..chain.verify_chain import filtering, run, sampling_of
from .distribution import GUMBEL, MASSES
from .draft import ONE_HOT, Draft
from .tile import allowed_words


def sample(*args: Any) -> tuple[Tensor, ...]:
    """`reference.sample` on a CUDA device; CPU tensors with TRITON_INTERPRET=1.

    A row is sampled as the bonus row of a chain without drafts, with noise of its own.
    """
    a = SampleArguments(*args)
    out = a.new_outputs()
    n, v = a.logits.shape
    if n == 0:
        return out
    tokens, logprobs, logsumexp, threshold, status = out
    gumbel = a.method_name == "gumbel"
    seeds, positions = launch.packed(a.seeds, a.positions)
    call = Call(
        draft_token_ids=tokens, draft_logsumexp=None, draft_threshold=None,
        draft_temperatures=None, draft_temperature=1.0, target_indptr=None, **sampling_of(v, a),
        seeds=seeds, positions=positions, uniforms=None, lenience=1.0, eos_token_ids=None,
        max_new_tokens=None, num_eos=0, id_limit=v, gamma=0, n_rows=n,
    )  # fmt: skip
    options = {
        "RULE": (MATCH if gumbel else TOKEN).value, "STATS": (GUMBEL if gumbel else MASSES).value,
        "STREAM": STREAMS[a.noise_name], "FILTERS": filtering(v, call), "PROBS": False,
        "DIRECT": False, "DRAFT": ONE_HOT.value, "READS_DRAFT": False,
    }  # fmt: skip
    outputs = Outputs(tokens, None, status, logprobs, None, logsumexp, threshold)
    words, stride, _ = allowed_words(a.logits, a.token_bitmask, flat=False)
    target = Target(a.logits, a.logits.stride(0), 0, v, words, stride, 0)
    draft = Draft(a.logits, 0, 0, 0, None, None, a.logits, 0, 0)
    run(target, draft, call, outputs, options)
    return out
