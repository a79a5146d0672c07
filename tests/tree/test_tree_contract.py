"""The result of `verify_tree` for one sequence depends on little.

It depends on those of its own rows that the rule needs, and not on padding.
tests/chain/test_invariance.py shows the same of the batch and the number of threads.
"""

import proofs
import pytest
import torch
from proofs import assert_close, assert_outputs_equal
from support.providers import TREE_PAIRS, WHOLE_PROVIDERS, provider

from specdec_kernels.arguments.rules import TREE_RULES
from specdec_kernels.arguments.tree import TreeArguments

PAIRS = [pytest.param(n, c, id=f"{n}-{c}") for n, c in TREE_PAIRS]


def padded(a, more):
    """The arguments with `more` absent nodes at the end."""

    def wider(x, fill, dim=1):
        shape = list(x.shape)
        shape[dim] = more
        return torch.cat([x, torch.full(shape, fill, dtype=x.dtype)], dim)

    changed = dict(target=wider(a.target, 0), tree_tokens=wider(a.tree_tokens, -1),
                   parents=wider(a.parents, -1))  # fmt: skip
    if a.draft_rows is not None:
        changed["draft_rows"] = wider(a.draft_rows, 10**6)
    elif a.draft is not None:
        of_nodes = ("draft", "draft_ids", "draft_logsumexp", "draft_threshold")
        changed |= {k: wider(x, 0) for k in of_nodes if (x := getattr(a, k)) is not None}
    return a._replace(**changed)


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_absent_nodes_at_the_end_change_no_bit(name, case):
    op, a = provider("verify_tree", name), TreeArguments(*case.args())
    want, got = op(*a), op(*padded(a, 3))
    assert_outputs_equal("verify_tree", (*got[:5], got[5][:, : want[5].shape[1]]), want)
    assert got[5][:, want[5].shape[1] :].isnan().all()
    deeper = op(*padded(a, 3)._replace(max_depth=a.max_depth + 2))
    for i, fill in ((0, -1), (1, -1), (4, 0)):
        width = want[i].shape[1]
        assert_close(f"output {i}", deeper[i][:, :width], want[i])
        assert (deeper[i][:, width:] == fill).all()


# Rules read the target rows of the root and of accepted nodes, and the draft rows of tried nodes;
# traversal also reads the target rows of tried nodes.


@pytest.mark.parametrize(
    ("name", "rule", "filters"),
    [(n, r, f) for n in WHOLE_PROVIDERS[1:] for r in TREE_RULES for f in ("off", "scalar")],
)
def test_rows_off_the_path_are_not_read(name, rule, filters):
    op = provider("verify_tree", name)
    b, n = 12, 9
    a = TreeArguments(*proofs.tree_case(b, n, 67, rule=rule, filters=filters).args())
    a = a._replace(with_accept_probs=True)
    want = op(*a)
    untouched = 0
    for i in range(b):
        on_path = {int(x) for x in want[0][i] if x >= 0}
        tried = {x for x in range(n) if not want[5][i, x].isnan()}
        read = tried | on_path if rule == "traversal" else on_path
        for node in range(n):
            if node not in read:
                a.target[i, node + 1] = torch.nan
            if node not in tried | on_path:
                a.draft[i, node] = torch.nan
                untouched += 1
    assert untouched > 0
    assert_outputs_equal("verify_tree", op(*a), want)


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("name", WHOLE_PROVIDERS[1:])
def test_all_outputs_are_written_for_invalid_rows(name, rule):
    torch.use_deterministic_algorithms(True)
    op = provider("verify_tree", name)
    a = TreeArguments(*proofs.tree_case(4, 4, 67, rule=rule).args())
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        a.target[i] = value
    a.tree_tokens[3] = 999
    got = op(*a)
    assert got[3].tolist() == [1, 1, 1, 8]
    assert (got[0] == -1).all()
    assert (got[1][:3] == -1).all()
    assert 0 <= int(got[1][3, 0]) < 67
    assert not got[4].isnan().any()
    assert got[5].isnan().all()
