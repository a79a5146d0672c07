"""A result depends on (seed, position), the rows and the parameters of its own sequence alone.

The place in the batch, its size, padding, neighbours and the number of threads change no bit.
"""

import proofs
import pytest
import torch
from proofs import assert_all_equal, assert_close, assert_outputs_equal
from proofs.forward import linear_case
from proofs.history import ngram_case
from proofs.tree_layout import attention_case, expand_case, rerank_case, trie_case
from support.providers import KERNEL_PROVIDERS, SHIM_PROVIDERS, TREE_PAIRS, provider, run_case

from specdec_kernels import _library
from specdec_kernels.arguments.chain import ChainArguments

CHAINS = [
    proofs.chain_case(6, 3, 257), proofs.chain_case(6, 3, 257, draft="sampled", filters="tensor"),
    proofs.chain_case(6, 3, 131, torch.bfloat16, rule="match", filters="tensor"),
    proofs.chain_case(6, 3, 257, kind="probs", draft="none"),
    proofs.chain_case(6, 3, 257, rule="block", filters="tensor"),
    proofs.chain_case(6, 3, 257, rule="block", kind="probs"),
    proofs.chain_case(6, 3, 257, torch.bfloat16, rule="block", draft="sparse"),
    proofs.chain_case(6, 3, 257, rule="block", draft="mapped-sampled"),
    proofs.chain_case(6, 3, 257, draft="wide"), proofs.chain_case(6, 3, 257, rule="typical"),
    proofs.chain_case(6, 3, 257, rule="top_beta"),
    proofs.chain_case(6, 3, 257, rule="lenient", draft="sparse"),
    proofs.chain_case(6, 3, 257, rule="synthetic", filters="tensor"),
]  # fmt: skip
CHAIN_PAIRS = [("cpp", c) for c in CHAINS] + [
    (n, c)
    for n in KERNEL_PROVIDERS
    if n != "cpp"
    for c in (
        CHAINS[0], proofs.chain_case(6, 3, 67, rule="match"),
        proofs.chain_case(6, 3, 67, rule="block"),
    )
]  # fmt: skip


OTHER_CASES = [
    proofs.sample_case(5, 257, filters="tensor"),
    proofs.sample_case(5, 257, filters="scalar", method="gumbel"),
    attention_case(6, 9, 31, shape="faulty", window=4), rerank_case(6, 13, 6, levels=3),
    trie_case(6, 4, 5, 20), expand_case(5, 2, 300, 5, temperature="tensor"),
    ngram_case(9, 41, 5, lengths="faulty"),
]  # fmt: skip
OTHER_PAIRS = [
    *((n, c) for c in OTHER_CASES for n in proofs.providers(c.op) if n != "reference"),
    *((n, c) for c in OTHER_CASES[:2] for n in SHIM_PROVIDERS),
]


def named(pairs):
    return [pytest.param(n, c, id=f"{n}-{c.op}-{c}") for n, c in pairs]


# Arguments that all sequences share; so is a draft without a batch dimension.
SHARED = ("draft_columns", "synthetic_rates", "eos_token_ids")
FLAT = ("draft", "draft_ids", "draft_logsumexp", "draft_threshold")
# Arguments of shape [B, gamma, ..].
PER_DRAFT = ("draft_token_ids", "draft", "draft_ids", "draft_logsumexp", "draft_threshold")


def select(op, args, rows):
    """The arguments of an op for some sequences of a padded batch."""
    names = [a.name for a in getattr(torch.ops.specdec_kernels, op).default._schema.arguments]
    given = dict(zip(names, args, strict=True))
    flat = op == "verify_tree" and given["draft"] is not None and given["draft"].dim() == 2
    shared = SHARED + (FLAT if flat else ())
    return [x[rows] if torch.is_tensor(x) and k not in shared else x for k, x in given.items()]


def shifted(args, start, stop, at=0):
    """The arguments for drafts start .. stop - 1 alone, with positions moved by `at`."""
    a = ChainArguments(*args)
    cut = {k: x[:, start:stop] for k in PER_DRAFT if (x := getattr(a, k)) is not None}
    rates = None if a.synthetic_rates is None else a.synthetic_rates[start:stop]
    return a._replace(target=a.target[:, start : stop + 1], positions=a.positions + at,
                      synthetic_rates=rates, **cut)  # fmt: skip


@pytest.mark.parametrize(("name", "case"), named(CHAIN_PAIRS + TREE_PAIRS + OTHER_PAIRS))
def test_place_in_the_batch_and_batch_size_change_no_bit(name, case):
    op, args = provider(case.op, name), case.args()
    whole = op(*args)
    b = len(whole[0])
    order = torch.randperm(b, generator=torch.Generator().manual_seed(1))
    assert_outputs_equal(case.op, op(*select(case.op, args, order)), [x[order] for x in whole])
    for i in range(2 if name == "triton" else b):
        alone = op(*select(case.op, args, [i]))
        assert_outputs_equal(case.op, alone, [x[i : i + 1] for x in whole])


@pytest.mark.parametrize(("name", "case"), named(CHAIN_PAIRS))
def test_padding_with_missing_drafts_changes_no_bit(name, case):
    """gamma = 2 equals the start of gamma = 3 whose last draft is missing."""
    op = provider("verify_chain", name)
    args = ChainArguments(*case.args())
    args.draft_token_ids[:, 2] = -1
    longer = op(*args)
    got = op(*shifted(args, 0, 2))
    short = [x[:, : g.shape[1]] if x.dim() == 2 else x for x, g in zip(longer, got, strict=True)]
    assert_outputs_equal("verify_chain", got, short)
    assert (longer[0][:, 3] == -1).all()


# Rule block may decide otherwise about the same drafts in a longer chain.
@pytest.mark.parametrize(
    ("name", "case"), named((n, c) for n, c in CHAIN_PAIRS if "block" not in str(c))
)
def test_a_chain_that_starts_later_continues_the_same_decisions(name, case):
    """Where draft 0 is accepted, the rest equals a call that starts at draft 1 and its position."""
    op = provider("verify_chain", name)
    args = case.args()
    whole = op(*args)
    got = op(*shifted(args, 1, 3, at=1))
    accepted = whole[1] > 0
    assert accepted.any()
    assert_close("tokens", got[0][accepted], whole[0][accepted, 1:])
    assert_close("num_accepted", got[1][accepted] + 1, whole[1][accepted])


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
THREADED = [c for c in proofs.CASES if c.heavy or c.op in _library.CACHE_OPS] + [
    *OTHER_CASES[2:5], expand_case(5, 4, 9000, 12, temperature="tensor"),
    ngram_case(3, 4099, 17, lengths="full"),
    *(c for c in proofs.CASES if c.op == "pack_linear"),
    *(linear_case((m,), n, k, d) for d in DTYPES for m, n, k in ((6, 577, 257), (130, 1000, 640))),
    proofs.sample_case(1, 50_001, filters="scalar", noise="shared", method="gumbel"),
    proofs.sample_case(3, 50_001, filters="tensor"),
    proofs.chain_case(1, 2, 50_001, rule="match", filters="scalar"),
    proofs.chain_case(1, 2, 50_001, kind="probs"),
    proofs.chain_case(1, 2, 50_001, rule="block", draft="sampled", filters="scalar"),
    proofs.chain_case(1, 2, 50_001, rule="block", kind="probs", draft="mapped"),
    proofs.chain_case(1, 2, 50_001, rule="typical", filters="topp"),
    proofs.chain_case(5, 2, 10_001, draft="sampled", layout="ragged"),
    *(
        proofs.tree_case(1, 5, 50_001, rule=r, rows="shared", filters=f)
        for r, f in (
            ("multi_draft", "off"), ("multi_draft_wor", "scalar"), ("k_seq", "off"),
            ("traversal", "topp"), ("target_only", "off"), ("typical", "off"), ("match", "off"),
        )
    ),
    proofs.tree_case(5, 6, 10_001, rule="multi_draft_wor", rows="shared"),
    proofs.tree_case(1, 5, 50_001, rule="top_k_plus_one", kind="probs", rows="shared"),
    proofs.tree_case(1, 5, 50_001, draft="mapped", rows="flat"),
]  # fmt: skip


@pytest.mark.parametrize("case", THREADED, ids=lambda c: f"{c.op}-{c}")
def test_the_number_of_threads_changes_no_bit_of_any_op(case):
    torch.use_deterministic_algorithms(True)  # an output that no thread writes is NaN
    torch.set_num_threads(1)
    alone = run_case(case)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_all_equal(run_case(case), alone)
