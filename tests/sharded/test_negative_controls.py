"""Wrong implementations that the comparison with the unsharded op must reject."""

import re

import pytest
from support.providers import assert_outputs_close, provider
from support.sharded import sharded_provider, verify_wrongly

from specdec_kernels.testing.chain import chain_case

cpp = provider("verify_chain", "cpp")
# The wrong implementation, and a rule and filters that it breaks.
CONTROLS = [
    ("argmax that prefers the highest id", "greedy", "off"),
    ("top-k and top-p of each shard alone", "match", "topp"),
    ("top-k and top-p of each shard alone", "token", "topk"),
    ("residual without the factor of the block", "block", "off"),
    ("uniforms of each rank's own", "token", "off"),
]


def arguments(rule, filters):
    """Rows with many ties, and half of the drafts rejected."""
    args = chain_case(100, 3, 60, rule=rule, filters=filters, acceptance=0.5).args()
    return (args[0].round() if rule == "greedy" else args[0], *args[1:])


@pytest.mark.parametrize(("wrong", "rule", "filters"), CONTROLS)
def test_a_wrong_implementation_is_rejected(ranks, wrong, rule, filters):
    args = arguments(rule, filters)
    want = cpp(*args)
    assert_outputs_close("verify_chain", sharded_provider(ranks, 3)(*args), want)
    with pytest.raises(AssertionError):
        assert_outputs_close(
            "verify_chain", sharded_provider(ranks, 3, wrong, function=verify_wrongly)(*args), want
        )


def test_ranks_that_decide_differently_raise_on_all(ranks):
    """Probabilities of each shard alone, which differ between ranks, lead to other decisions."""
    args = arguments("token", "off")
    for done, answer in ranks.answers(3, verify_wrongly, args, "probabilities of each shard alone"):
        assert not done
        assert answer[1].startswith("the number of accepted drafts must be equal on all ranks")
        assert re.search(r"got \[\d, \d, \d\] on them for sequence \d+$", answer[1])
