"""specdec_host gives the bits of the torch ops."""

import numpy as np
import proofs
import pytest
import specdec_host
import torch
from support.host_ops import arguments_of, call, check_equal_bits
from support.providers import provider

OPS = ("sample", "verify_chain", "verify_tree")
CASES = [
    pytest.param(case, id=f"{op}-{case}", marks=[pytest.mark.full] if case.heavy else [])
    for op in OPS
    for case in proofs.cases(op, heavy=True)
]


def torch_op(op):
    return provider(op, "cpp")


@pytest.mark.parametrize("case", CASES)
def test_numpy_arrays_give_the_bits_of_the_torch_op(case):
    args = case.args()
    check_equal_bits(call(case.op, args), torch_op(case.op)(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_read_through_dlpack(dtype):
    chain = proofs.chain_case(3, 4, 67, dtype, draft="sampled", layout="sliced", filters="tensor")
    tree = next(c for c in proofs.cases("verify_tree") if "bf16" in c.id)
    for case in (chain, tree):
        args = case.args()
        check_equal_bits(call(case.op, args, lambda t: t), torch_op(case.op)(*args))


FAULTS = {
    "target row with NaN": ("target", lambda t: t[1].fill_(torch.nan)),
    "target row with one NaN": ("target", lambda t: t[2, 0, 5].fill_(torch.nan)),
    "target row of -inf": ("target", lambda t: t[:, 0].fill_(-torch.inf)),
    "draft row with NaN": ("draft", lambda t: t[:, 1].fill_(torch.nan)),
    "draft is certain of another token": ("draft", lambda t: t.fill_(-torch.inf)[..., 3].fill_(0)),
    "drafted id out of range": ("draft_token_ids", lambda t: t[:, 2].fill_(67)),
    "negative id": ("draft_token_ids", lambda t: t[0, 0].fill_(-2)),
    "temperature out of range": ("temperatures", lambda t: t[1].fill_(-1)),
    "top_p out of range": ("top_ps", lambda t: t[2].fill_(1.5)),
}


@pytest.mark.covering(test=1)
@pytest.mark.parametrize(
    "rule", ["token", "block", "match", "greedy", "typical", "top_beta", "lenient"]
)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_data_set_the_same_status(fault, rule):
    case = proofs.chain_case(4, 3, 67, rule=rule, filters="tensor")
    names = arguments_of("verify_chain")
    name, spoil = FAULTS[fault]
    args = case.args()
    spoil(args[names.index(name)])
    got = call("verify_chain", args)
    check_equal_bits(got, torch_op("verify_chain")(*args))
    if name.startswith(("target", "temp", "top_p")):
        bit = "TARGET_INVALID" if name == "target" else "BAD_PARAMETER"
        assert specdec_host.Status(int(np.bitwise_or.reduce(got.status))) & specdec_host.Status[bit]


def test_the_number_of_threads_changes_no_bit_of_numpy_arrays():
    before = specdec_host.get_num_threads()
    try:
        specdec_host.set_num_threads(3)
        for b in (1, 9):  # threads share one row, or each takes a sequence
            case = proofs.chain_case(b, 3, 20_000, filters="tensor", draft="sampled")
            args = case.args()
            check_equal_bits(call("verify_chain", args), torch_op("verify_chain")(*args))
    finally:
        specdec_host.set_num_threads(before)
