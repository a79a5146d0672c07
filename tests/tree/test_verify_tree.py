"""`verify_tree` of every provider against the reference, and trees with a known answer."""

import random
from typing import Any, NamedTuple

import proofs
import pytest
import torch
from proofs import assert_close, assert_outputs_close, assert_outputs_equal
from support.providers import (
    HEAVY_PROVIDERS,
    WHOLE_PROVIDERS,
    provider,
    provider_cases,
    verify_tree,
)

from specdec_kernels import Status, reference
from specdec_kernels.arguments.chain import ChainArguments
from specdec_kernels.arguments.rules import TREE_RULES, TREE_RULES_READING_DRAFT
from specdec_kernels.arguments.tree import TreeArguments

NAN = float("nan")
TOP_DOWN_RULES = [r for r in TREE_RULES if r != "traversal"]


def each(rules):
    pairs = [(n, r) for n in WHOLE_PROVIDERS for r in rules]
    return pytest.mark.parametrize(("name", "rule"), pairs)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize(("name", "case"), provider_cases("verify_tree"))
def test_agrees_with_the_reference(name, case):
    got, want = provider("verify_tree", name)(*case.args()), reference.verify_tree(*case.args())
    assert_outputs_close("verify_tree", got, want)


FORMS = ("none", "full", "sampled", "sparse", "mapped", "wide", "narrow", "wide-sampled")


def random_case(r, rule, *, small):
    """small: for an emulator, which takes up to a second for each row."""
    kind = r.choice(["logits", "probs"])
    forms = [f for f in FORMS if not (kind == "probs" and "sampled" in f)]
    draft = r.choice([f for f in forms if f != "none"] if rule == "k_seq" else forms)
    # Filters take float32 logarithms of probabilities, in which ties may be lost.
    filters = ["off", "off", "warm"] if kind == "probs" else ["off", "scalar", "tensor", "minp"]
    return proofs.tree_case(
        1 if small else r.choice([1, 3]), r.choice([1, 5] if small else [1, 5, 11]),
        r.choice([2, 23, 131]),
        r.choice([torch.float32, torch.bfloat16]), rule, kind=kind, draft=draft,
        rows=r.choice(["each", "shared", "flat"]), filters=r.choice(filters),
        layout=r.choice(["dense", "sliced", "ragged"]), chain=r.random() < 0.1,
        acceptance=r.choice([0.4, 0.7, 0.9]), limits=r.random() < 0.2,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("name", WHOLE_PROVIDERS[1:])
def test_random_trees_agree_with_the_reference(name, rule):
    r = random.Random(rule)
    for _ in range(40 if name == "cpp" else 6):
        case = random_case(r, rule, small=name != "cpp")
        got = provider("verify_tree", name)(*case.args())
        try:
            assert_outputs_close("verify_tree", got, reference.verify_tree(*case.args()))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


# A chain is a tree whose nodes have one child each.


def chain_as_tree(a, rule, uniforms):
    """The arguments of `verify_tree` for a chain."""
    b, gamma = a.draft_token_ids.shape
    if uniforms is not None:
        last = uniforms[:, gamma:].expand(b, gamma + 1)
        uniforms = torch.cat([uniforms[:, :gamma], last], 1).contiguous()
    parents = torch.arange(-1, gamma - 1).expand(b, gamma)
    shared = {k: x for k, x in a._asdict().items() if k in TreeArguments._fields}
    changed = dict(rule=TREE_RULES.index(rule), uniforms=uniforms, max_depth=gamma)
    return TreeArguments(**{**shared, **changed}, tree_tokens=a.draft_token_ids, parents=parents)


SAME = [
    ("token", "multi_draft"), ("token", "multi_draft_wor"), ("token", "k_seq"),
    ("token", "top_k_plus_one"), ("block", "traversal"), ("match", "match"), ("greedy", "greedy"),
]  # fmt: skip


# match takes no uniforms.
SAME_GIVEN = [(*rules, given) for rules in SAME for given in (True, False) if rules[0] != "match"]


@pytest.mark.parametrize(
    ("rule", "tree_rule", "given"), [*SAME_GIVEN, ("match", "match", False)], ids=str
)
@pytest.mark.parametrize("name", WHOLE_PROVIDERS)
def test_a_chain_gives_the_bits_of_verify_chain(name, rule, tree_rule, given):
    r = random.Random(f"{rule}{given}")
    ratio = rule in ("token", "block")
    for _ in range(40 if name == "cpp" else 10):
        kind = r.choice(["logits", "probs"])
        forms = [f for f in FORMS if ratio and not (kind == "probs" and "sampled" in f)]
        if rule == "token" and tree_rule == "k_seq":
            forms.remove("none")
        case = proofs.chain_case(
            2, r.choice([1, 3]), r.choice([5, 131] + [4200] * (name in ("cpp", "cuda"))),
            r.choice([torch.float32, torch.bfloat16]), rule, kind=kind,
            draft=r.choice(forms or ["none"]),
            filters=r.choice(["off", "scalar", "tensor", "warm"]), limits=r.random() < 0.3,
            acceptance=r.choice([0.4, 0.8]),
        )  # fmt: skip
        a = ChainArguments(*case.args())
        uniforms = None
        if given:
            shape = (a.draft_token_ids.shape[0], a.draft_token_ids.shape[1] + 1)
            g = torch.Generator().manual_seed(r.randrange(2**31))
            uniforms = torch.rand(shape, generator=g, dtype=torch.float64)
        want = provider("verify_chain", name)(*a._replace(uniforms=uniforms))
        path, *got = provider("verify_tree", name)(*chain_as_tree(a, tree_rule, uniforms))
        assert_outputs_equal("verify_chain", got, want)
        steps = torch.arange(path.shape[1])
        assert_close("path", path, torch.where(steps < want[1][:, None], steps, -1))


# Trees with a known answer. Tokens are 0 to 3, and each target row is uniform over some of them.


class Decided(NamedTuple):
    """What `verify_tree` returns, the first four as lists."""

    path: list[Any]
    tokens: list[Any]
    accepted: list[int]
    status: list[int]
    logprobs: torch.Tensor
    accept_probs: torch.Tensor


def decided(name, target, tokens, parents, draft=None, **options):
    """tokens, parents: of one tree, or [B, N]."""
    nodes = [x if torch.is_tensor(x) else torch.tensor([x]) for x in (tokens, parents)]
    out = verify_tree(provider("verify_tree", name), target, *nodes, draft, **options)
    return Decided(*(x.tolist() for x in out[:4]), *out[4:])


def uniform_over(*rows):
    target = torch.full((1, len(rows), 4), -torch.inf)
    for i, tokens in enumerate(rows):
        target[0, i, list(tokens)] = 0.0
    return target


def f64(*values):
    return torch.tensor([values], dtype=torch.float64)


def rows_of(*rows):
    return torch.tensor([rows], dtype=torch.int32)


by_provider = pytest.mark.parametrize("name", WHOLE_PROVIDERS)
UNKNOWN = (torch.zeros(1, 1).double(), torch.full((1, 1), -torch.inf), 1.0)  # wrong statistics


@by_provider
def test_layout_of_the_outputs(name):
    """Node 0 is rejected, its sibling 2 and its child 3 are accepted, and a bonus token follows."""
    target = uniform_over((1, 2), (0,), (0,), (3,), (2, 3))
    got = decided(name, target, [0, 3, 1, 3], [-1, 0, -1, 2], rule="target_only",
                  uniforms=f64(0, 0, 0, 0, 0.4, 0.5, 0.9, 0, 0))  # fmt: skip
    assert got[:4] == ([[2, 3, -1, -1]], [[1, 3, 3, -1, -1]], [2], [0])
    half = -0.6931472
    assert_close("logprobs", got.logprobs, torch.tensor([[half, 0, half, 0, 0]]), atol=1e-6)
    assert_close("accept_probs", got.accept_probs, torch.tensor([[0, NAN, 0.5, 1]]), atol=1e-6)


@each(TOP_DOWN_RULES)
def test_siblings_with_equal_tokens_count_as_one_node(name, rule):
    """Two siblings have token 1, and the accepted child is below the second."""
    target = uniform_over((1,), (2,), (2,), (3,), (3,))
    form = dict(draft=torch.full((1, 4, 4), 0.25), kind="probs") if rule == "k_seq" else {}
    target = target.softmax(-1) if form else target
    got = decided(name, target, [1, 1, 0, 2], [-1, -1, 0, 1], rule=rule, **form)
    assert got[:2] == ([[0, 3, -1, -1]], [[1, 2, 3, -1, -1]])


def star(rule, draft=None, **kw):
    """A root with four children, tokens 0 to 3. P is one-hot: token 2 first, token 3 after it."""
    target = uniform_over((2,), (3,), (3,), (3,), (3,))
    tokens, parents = torch.tensor([[0, 1, 2, 3]]), torch.full((1, 4), -1)
    if rule == "k_seq":
        draft = torch.zeros(1, 4, 4)
    return target, tokens, parents, draft, dict(rule=rule) | kw


@pytest.mark.covering(emulated=1)
@each(TREE_RULES)
def test_limits_end_the_path(name, rule):
    for kw, path, tokens in (
        ({}, [2], [2, 3]),
        (dict(max_new_tokens=torch.tensor([0])), [-1], [-1, -1]),
        (dict(max_new_tokens=torch.tensor([-3])), [-1], [-1, -1]),
        (dict(max_new_tokens=torch.tensor([1])), [2], [2, -1]),
        (dict(max_new_tokens=torch.tensor([2])), [2], [2, 3]),
        (dict(eos_token_ids=torch.tensor([9, 2])), [2], [2, -1]),
        (dict(eos_token_ids=torch.tensor([2, 9])), [2], [2, -1]),
        (dict(eos_token_ids=torch.tensor([3])), [2], [2, 3]),
        (dict(max_depth=0), [], [2]),
    ):
        *args, given = star(rule, **kw)
        got = decided(name, *args, **({"max_depth": 1} | given))
        assert got[:4] == ([path], [tokens], [sum(n >= 0 for n in path)], [0]), kw


@each(TREE_RULES)
def test_nodes_out_of_range_are_absent_and_set_a_status_bit(name, rule):
    target, tokens, parents, draft, kw = star(rule)
    for bad_token, bad_parent, status in (
        (-1, -1, 0), (4, -1, 8), (-2, -1, 8), (2**40, -1, 8), (2, 2, 8), (2, 3, 8), (2, -2, 8),
        (2, 2**40, 8),
    ):  # fmt: skip
        tokens[0, 2], parents[0, 2] = bad_token, bad_parent
        got = decided(name, target, tokens, parents, draft, **kw)
        assert got[:4] == ([[-1] * 4], [[2, -1, -1, -1, -1]], [0], [status]), (tokens, parents)


@pytest.mark.covering(emulated=1)
@each(TREE_RULES_READING_DRAFT)
def test_an_invalid_draft_row_ends_the_trials(name, rule):
    """The next token is drawn from the residual before that child, which is P here."""
    target, tokens, parents, _, kw = star(rule)
    # top_k_plus_one accepts the draw from P, which is a child.
    accepted = int(rule == "top_k_plus_one")
    for bad in (NAN, torch.inf):
        draft = torch.full((1, 1, 4), bad)
        for row in (0, 1, -1):
            got = decided(
                name, target, tokens, parents, draft, draft_rows=rows_of(*[row] * 4), **kw
            )
            assert (got.accepted, got.status, got.tokens[0][0]) == ([accepted], [2], 2), row


@by_provider
def test_trials_before_an_invalid_draft_row_count(name):
    """Rejecting node 0 leaves token 2 in the residual; the second draft row is invalid."""
    target = uniform_over((1, 2), (0,), (0,)).softmax(-1)
    draft = torch.tensor([[[0.0, 0.5, 0.0, 0.5], [NAN] * 4]])
    for last in (0.0, 0.99):
        got = decided(name, target, [3, 1], [-1, -1], draft, kind="probs", rule="multi_draft",
                      uniforms=f64(0, 0, last, 0, 0))  # fmt: skip
        assert (got.tokens, got.status) == ([[2, -1, -1]], [2])


@pytest.mark.covering(emulated=1)
@each(TREE_RULES_READING_DRAFT)
def test_an_invalid_draft_entry_of_a_token_that_no_child_has_ends_the_trials(name, rule):
    """The residual, or rho, would depend on it. The next token is drawn from P."""
    target = uniform_over((1, 2), (0,), (0,)).softmax(-1)
    draft = torch.tensor([[[0.25, NAN, 0.25, 0.5]]])
    for top_k in (0, 2):  # 2 leaves a list of survivors
        got = decided(name, target, [3, 0], [-1, -1], draft, kind="probs", rule=rule, top_k=top_k,
                      draft_rows=rows_of(0, 0), uniforms=f64(0, 0, 0.99, 0, 0))  # fmt: skip
        assert (got.tokens, got.status) == ([[2, -1, -1]], [2])


@by_provider
def test_traversal_draws_from_the_row_of_the_node_that_ends_the_path(name):
    """The row after its rejected child was read last; its mass is in another tile."""
    target, draft = torch.zeros(1, 2, 5000), torch.full((1, 1, 5000), 1 / 5000)
    target[0, 0, [4500, 4600]] = 0.5
    target[0, 1, 3] = 1.0
    draft[0, 0, 9] = NAN
    got = decided(name, target, [7], [-1], draft, kind="probs", rule="traversal",
                  uniforms=f64(0, 0.9, 0))  # fmt: skip
    assert (got.tokens, got.status) == ([[4600, -1]], [2])


@pytest.mark.slow
@pytest.mark.parametrize("name", [p for p in HEAVY_PROVIDERS if "triton" not in p.values])
def test_siblings_of_two_parents_and_two_distributions_are_kept_apart(name):
    """Equal tokens, drafts outside the target's vocabulary, draft rows shared by all parents."""
    op, want = provider("verify_tree", name), provider("verify_tree", "reference")
    g = torch.Generator().manual_seed(3)
    n, v, d, nodes = 200, 4, 6, 8
    target = torch.randn(n, nodes + 1, v, generator=g)
    draft = 2 * torch.randn(2, d, generator=g)
    rows = torch.randint(0, 2, (n, nodes), generator=g, dtype=torch.int32)
    parents = torch.tensor([-1, -1, 0, 1, 0, 1, 0, 1]).expand(n, -1)
    tokens = torch.randint(0, d, (n, nodes), generator=g)
    tokens[:, 1] = tokens[:, 0]
    for rule in ("multi_draft_wor", "multi_draft"):
        given = dict(rule=rule, draft_rows=rows, seeds=torch.arange(n))
        pair = (verify_tree(x, target, tokens, parents, draft, **given) for x in (op, want))
        assert_outputs_close("verify_tree", *pair)


@pytest.mark.parametrize("rule", ["multi_draft_wor", "top_k_plus_one"])
@by_provider
def test_a_draft_whose_remaining_mass_underflows_ends_the_trials(name, rule):
    """Node 1 has the token with logit -87.7, which has almost no weight beside logit 0."""
    draft = torch.tensor([[[0.0, -87.0, -87.7]]])
    got = decided(name, torch.zeros(1, 3, 3), [0, 2], [-1, -1], draft, rule=rule,
                  draft_rows=rows_of(0, 0), uniforms=f64(0.999, 0, 0.999, 0, 0))  # fmt: skip
    assert got.accept_probs[0, 1].isnan() or rule == "top_k_plus_one"
    assert got.accepted == [0]


@by_provider
def test_a_sibling_that_cannot_have_been_drawn_is_skipped(name):
    """Node 1, as above; node 2 has a draft row of its own and is tried."""
    draft = torch.tensor([[[0.0, -87.0, -87.7], [0.0, 0.0, 0.0]]])
    got = decided(name, torch.zeros(1, 4, 3), [0, 2, 1], [-1] * 3, draft, rule="multi_draft_wor",
                  draft_rows=rows_of(0, 0, 1), uniforms=f64(0.999, 0, 0.5, 0, 0, 0, 0))  # fmt: skip
    assert got.path == [[2, -1, -1]]


@by_provider
def test_typical_accepts_the_first_of_equally_likely_or_equal_children(name):
    """Of two siblings with one token the second has a child; the row after the first decides."""
    target = uniform_over((1, 2), (0,), (0,))
    assert decided(name, target, [2, 1], [-1, -1], rule="typical").path == [[0, -1]]
    target = torch.linspace(0, 1, 40).repeat(1, 4, 1)
    target[0, 0, 5] = 50
    assert decided(name, target, [5, 5, 20], [-1, -1, 1], rule="typical").path == [[0, 2, -1]]


@by_provider
def test_traversal_draws_from_the_target_after_a_draft_that_nowhere_exceeds_it(name):
    """Q sums to 0.4. No part of P is its own, so the residual counts as empty."""
    draft = torch.tensor([[[0.0, 0.4, 0.0, 0.0]]]).log()
    got = decided(name, uniform_over((1, 2), (0,)), [3], [-1], draft, rule="traversal",
                  sampled=UNKNOWN, uniforms=f64(0.5, 0.3, 0.3))  # fmt: skip
    assert (got.tokens, got.status) == ([[1, -1]], [Status.EMPTY_RESIDUAL])


@pytest.mark.covering(emulated=1)
@each(TREE_RULES_READING_DRAFT)
def test_an_infinite_q_is_no_fault_of_the_row(name, rule):
    """The logsumexp is that of twice the temperature: Q is exp(95) at token 1, else exp(-95)."""
    draft = torch.tensor([[[0.0, 95.0, 0.0, 0.0, 0.0, 0.0]]])
    sampled = (torch.tensor([[95.0]]).double(), torch.zeros(1, 1), 0.5)
    for token, want in ((1, [2, -1]), (2, [2, 0])):
        got = decided(name, torch.zeros(1, 2, 6), [token], [-1], draft, rule=rule, sampled=sampled,
                      uniforms=f64(0.5, 0.25, 0))  # fmt: skip
        assert (got.tokens, got.status) == ([want], [0])


@by_provider
def test_wrong_row_statistics_never_emit_a_token_without_target_probability(name):
    """With these statistics the draft row has exp(300) as a probability."""
    target = torch.tensor([0.0, 1.0, -torch.inf, -torch.inf]).expand(1, 2, 4)
    draft = torch.tensor([[[300.0, 250.0, 400.0, 90.0]]])
    got = decided(name, target, [3], [-1], draft, rule="multi_draft", sampled=UNKNOWN,
                  uniforms=f64(0.5, 0.9, 0))  # fmt: skip
    assert got.tokens[0][0] in (0, 1)
