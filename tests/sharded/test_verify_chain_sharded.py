"""Verification over a sharded vocabulary gives the verdict of `verify_chain` over whole rows."""

import proofs
import pytest
from proofs import assert_outputs_close, assert_outputs_equal
from proofs.chain import chain_case
from proofs.toy_chain import ToyChain, assert_target_distribution
from sharded.on_ranks import count_bytes, sharded_provider
from support.providers import provider

from specdec_kernels import RULES
from specdec_kernels.sharded import SHARDED_RULES

EXACT = ("greedy", "match")
SETTINGS = [
    *(("token", filters) for filters in ("off", "topk")),
    ("block", "off"),
    *(("match", filters) for filters in ("scalar", "tensor")),
    *(
        pytest.param(*pair, marks=pytest.mark.full)
        for pair in (("greedy", "off"), ("token", "tensor"), ("block", "topp"), ("block", "minp"))
    ),
]
# Vocabulary, ranks, and where the shards start: uneven, of one token, not in the order of ranks,
# and empty where two start at once.
SPLITS = ((131, 3, (0, 130, 1)), (29, 4, (25, 2, 0, 2)))
NOT_SERVED = {*RULES} - {*SHARDED_RULES} | {"probs", "mapped", "wide", "narrow"}
NOT_SERVED |= {"flat", "chosen"}
# What no random case below has. The large ones are worked on a few sequences at a time.
EDGES = {"B0", "g0", "V1", "bf16", "f16", "sampled", "sparse", "limits", "mask"}
SERVED = [
    pytest.param(c, marks=[pytest.mark.full] * (c.heavy or not EDGES & words), id=c.id)
    for c in proofs.cases("verify_chain", heavy=True)
    if not NOT_SERVED & (words := {*c.id.split("-")})
]
cpp = provider("verify_chain", "cpp")


@pytest.mark.parametrize("case", SERVED)
def test_each_case_of_the_op_has_the_verdict_of_the_op(ranks, case):
    args = case.args()
    assert_outputs_close("verify_chain", sharded_provider(ranks, 3)(*args), cpp(*args))


@pytest.mark.parametrize(("rule", "filters"), SETTINGS)
def test_a_thousand_random_cases_equal_the_unsharded_op(ranks, rule, filters):
    """Rules greedy and match bit for bit; the others differ where a uniform lies within rounding
    of a step of the cumulative distribution."""
    differing = 0
    for vocab, size, starts in SPLITS:
        layout = "ragged" if size == 3 else "dense"
        case = chain_case(500, 3, vocab, rule=rule, filters=filters, layout=layout)
        args = case.args()
        got, want = sharded_provider(ranks, size, starts)(*args), cpp(*args)
        equal = (got[0] == want[0]).all(-1)
        differing += int((~equal).sum())
        kept = [[x[equal] for x in out] for out in (got, want)]
        assert_outputs_close("verify_chain", *kept)
    assert differing <= (0 if rule in EXACT else 1)


@pytest.mark.parametrize("rule", ["token", "match"])
def test_the_bits_do_not_depend_on_the_number_of_ranks(ranks, rule):
    case = chain_case(200, 3, 131, rule=rule, filters="tensor")
    want = sharded_provider(ranks, 1)(*case.args())
    for size, starts in ((2, (1, 0)), (4, (0, 9, 9, 131))):
        assert_outputs_equal(
            "verify_chain", sharded_provider(ranks, size, starts)(*case.args()), want
        )


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("draft", ["full", "none", "sampled", "sparse"])
@pytest.mark.parametrize("rule", SHARDED_RULES)
def test_ranks_without_entries_change_no_bit(ranks, rule, draft):
    for layout in ("dense", "ragged"):
        case = chain_case(
            30, 3, 29, rule=rule, draft=draft, filters="tensor", layout=layout, limits=True
        )
        args = case.args()
        want = sharded_provider(ranks, 2)(*args)
        assert_outputs_close("verify_chain", want, cpp(*args))
        for starts in ((15, 29, 0), (0, 29, 15, 15)):
            got = sharded_provider(ranks, len(starts), starts)(*args)
            assert_outputs_equal("verify_chain", got, want)


@pytest.mark.parametrize(
    ("rule", "draft", "mask"), [("token", "sampled", ""), ("block", "sampled", "both")]
)
def test_the_emitted_tokens_have_the_targets_distribution(ranks, rule, draft, mask):
    """Every tuple of drafts and every cell of the uniforms, with the vocabulary on three ranks."""
    filters = {"temperature": 0.8, "top_k": 2, "top_p": 0.95}
    of_draft = {"temperature": 1.2, "top_k": 2}
    toy = ToyChain(
        draft=draft, rule=rule, seed=3, target_filters=filters, draft_filters=of_draft, mask=mask
    )
    assert_target_distribution(toy.realized(sharded_provider(ranks, 3)), toy)


@pytest.mark.covering(test=0)
@pytest.mark.parametrize("filters", ["off", "tensor"])
@pytest.mark.parametrize("rule", SHARDED_RULES)
def test_exchanged_bytes_do_not_depend_on_the_vocabulary(ranks, rule, filters):
    small, large = (
        ranks.run(4, count_bytes, chain_case(8, 3, vocab, rule=rule, filters=filters).args())
        for vocab in (40, 4000)
    )
    assert large == small == [small[0]] * 4
    logits = 32 * 4000 * 4 // 4  # what a rank hands out to gather the logits of 32 rows
    assert small[0][1] < logits
