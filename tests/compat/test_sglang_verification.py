"""SGLang's two tree verifiers: its literal example, its kernels one by one, and `verify_tree`."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from compat import sglang_loops
from compat.sglang_loops import EXAMPLE, chain, example_logits, outputs, random_tree, sample_down
from proofs import SIGNIFICANCE, chi_square

from specdec_kernels import Tree, verify_chain, verify_tree
from specdec_kernels.compat.sglang import (
    chain_speculative_sampling_triton,
    tree_speculative_sampling_target_only,
    verify_tree_greedy,
)

DRAWS = 20_000
GREEDY = ([3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18], [[0, 3, 4, 5], [6, 10, 11, -1]], [3, 2])
LOSSY = ([1, 2, 18, -1, -1, -1, 11, -1, -1, -1, 12, 18], [[0, 1, 2, -1], [6, 10, 11, -1]], [2, 2])


def lists(out):
    return [t.tolist() for t in out.values()]


def drawn(tree, probs, generator=None, s=4, single=1.0, acc=1.0, uniforms=None, draft_probs=None):
    """The outputs of the sampling verifier, with uniforms of the generator."""
    b, n, _ = probs.shape
    if uniforms is None:
        uniforms = torch.rand(b, n, generator=generator), torch.rand(b, generator=generator)
    draft_probs = torch.zeros_like(probs) if draft_probs is None else draft_probs
    out = outputs(b, n, s)
    tree_speculative_sampling_target_only(
        **out, **tree, uniform_samples=uniforms[0], uniform_samples_for_final_sampling=uniforms[1],
        target_probs=probs, draft_probs=draft_probs, threshold_single=single, threshold_acc=acc,
        deterministic=True,
    )  # fmt: skip
    return out


# Its own example.


def test_the_literal_examples():
    logits = example_logits()
    for threshold, want in ((1, GREEDY), (0, LOSSY)):
        probs, generator = (logits / 0.01).softmax(-1), torch.Generator().manual_seed(0)
        assert lists(drawn(EXAMPLE, probs, generator, single=threshold, acc=threshold)) == [*want]
    for spelling in ("retrieve_", "retrive_"):
        out = outputs(2, 6, 4)
        tree = {k.replace("retrieve_", spelling): v for k, v in EXAMPLE.items()}
        assert verify_tree_greedy(**out, **tree, target_predict=logits.argmax(-1)) is None
        assert lists(out) == [*GREEDY]


# Its kernels, one sequence at a time, and the ops.


@pytest.mark.covering(test=1)
@pytest.mark.parametrize(("n", "v", "s"), [(1, 5, 3), (4, 3, 4), (9, 4, 3), (16, 6, 7)])
@pytest.mark.parametrize(("single", "acc"), [(1.0, 1.0), (1.0, 0.4), (0.5, 1.0), (0.3, 0.0)])
def test_given_uniforms_decide_as_in_the_kernel(n, v, s, single, acc):
    generator = torch.Generator().manual_seed(n)
    tree, _ = random_tree(generator, 60, n, max(v, n))
    probs = torch.randn(60, n, max(v, n), generator=generator).mul(2).softmax(-1)
    uniforms = torch.rand(60, n, generator=generator), torch.rand(60, generator=generator)
    want = outputs(60, n, s)
    sample_down(want, tree, *uniforms, probs, single, acc)
    assert lists(drawn(tree, probs, s=s, single=single, acc=acc, uniforms=uniforms)) == lists(want)


@pytest.mark.parametrize(("n", "s"), [(1, 1), (4, 4), (9, 3), (9, 9)])
def test_draft_probs_decide_the_last_token_only(n, s):
    """They hold Q; after s - 1 accepted nodes the last token is drawn from P."""
    generator = torch.Generator().manual_seed(n)
    tree, _ = random_tree(generator, 60, n, 9)
    probs, draft = torch.randn(2, 60, n, 9, generator=generator).mul(2).softmax(-1)
    uniforms = torch.rand(60, n, generator=generator), torch.rand(60, generator=generator)
    want, without = outputs(60, n, s), outputs(60, n, s)
    sample_down(want, tree, *uniforms, probs, draft_probs=draft)
    sample_down(without, tree, *uniforms, probs)
    got = drawn(tree, probs, s=s, uniforms=uniforms, draft_probs=draft.clone())
    assert lists(got) == lists(want)
    assert got["accept_index"].tolist() == without["accept_index"].tolist()
    assert lists(want) != lists(without) or s == 1  # negative control


@pytest.mark.parametrize("s", [1, 3, 9])
def test_greedy_equals_verify_tree(s):
    generator = torch.Generator().manual_seed(s)
    b, n, v = 80, 9, 9
    tree, parents = random_tree(generator, b, n, v)
    target = torch.randint(v, (b, n), generator=generator)
    out = outputs(b, n, s)
    verify_tree_greedy(**out, **tree, target_predict=target)
    below = torch.tensor(parents)[:, 1:] - 1
    zeros = torch.zeros(b, dtype=torch.int64)
    want = verify_tree(
        torch.nn.functional.one_hot(target, v).float(), Tree(tree["candidates"][:, 1:], below),
        rule="greedy", seeds=zeros, positions=zeros, max_depth=s - 1,
    )  # fmt: skip
    assert out["accept_token_num"].tolist() == want.num_accepted.tolist()
    assert want.num_accepted.sum() > 0 or s == 1
    base = n * torch.arange(b)[:, None]
    path = torch.where(want.path >= 0, want.path + 1 + base, -1)
    assert out["accept_index"].tolist() == torch.cat([base, path], 1).tolist()
    for row, tokens in zip(out["accept_index"].tolist(), want.tokens.tolist(), strict=True):
        accepted = [i for i in row if i >= 0]
        assert out["predicts"][accepted].tolist() == tokens[: len(accepted)]


# Chains that were sampled from draft_probs.


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("n", [1, 2, 6])
def test_a_chain_is_verified_as_verify_chain_does(n, block):
    """With the kernel's own spelling, and rows for the root's successor that it leaves unread."""
    b, v = 60, 11
    given = chain(b, n, v, torch.Generator().manual_seed(n))
    out, wide = outputs(b, n, n), torch.nn.functional.pad(given["draft_probs"], (0, 0, 0, 1))
    spelled = {k.replace("retrieve_", "retrive_"): x for k, x in given.items()}
    chain_speculative_sampling_triton(
        **out, **spelled | dict(draft_probs=wide), block_verification=block
    )
    last = given["uniform_samples_for_final_sampling"][:, None]
    uniforms = torch.cat([given["uniform_samples"][:, : n - 1], last], 1)
    zeros = torch.zeros(b, dtype=torch.int64)
    want = verify_chain(
        given["target_probs"], given["candidates"][:, 1:], given["draft_probs"], kind="probs",
        rule="block" if block else "token", seeds=zeros, positions=zeros,
        uniforms=uniforms.double(),
    )  # fmt: skip
    assert out["accept_token_num"].tolist() == want.num_accepted.tolist()
    assert n == 1 or 0 < want.num_accepted.sum() < b * (n - 1)
    kept = torch.arange(n) <= want.num_accepted[:, None]
    at = torch.where(kept, given["retrieve_index"], -1)
    assert out["accept_index"].tolist() == at.tolist()
    assert out["predicts"].view(b, n).tolist() == want.tokens.tolist()


# The distribution.

ROOT = torch.tensor([0.1, 0.3, 0.4, 0.2])
CHILD = torch.tensor([0.25, 0.25, 0.0, 0.5])


def two_levels(tokens):
    """A root with children `tokens[:2]`, of which the second has the child `tokens[2]`."""
    return dict(
        candidates=torch.tensor([[0, *tokens]]).expand(DRAWS, -1),
        retrieve_index=torch.arange(4 * DRAWS).view(-1, 4),
        retrieve_next_token=torch.tensor([[1, -1, 3, -1]]).expand(DRAWS, -1),
        retrieve_next_sibling=torch.tensor([[-1, 2, -1, -1]]).expand(DRAWS, -1),
    )


def p_values(tokens, **options):
    """Of the token after the root, and of the one after the second child."""
    probs = torch.stack([ROOT, ROOT, CHILD, ROOT]).expand(DRAWS, -1, -1).contiguous()
    out = drawn(two_levels(tokens), probs, torch.Generator().manual_seed(2), **options)
    predicts = out["predicts"].view(DRAWS, 4).long()
    after_child = predicts[out["accept_index"][:, 1] % 4 == 2, 2]
    assert len(after_child) > 1000 or options or tokens[0] == tokens[1]
    second = chi_square(after_child, CHILD.double()) if len(after_child) else 1.0
    return chi_square(predicts[:, 0], ROOT.double()), second


@pytest.mark.parametrize("tokens", [(2, 1, 3), (2, 2, 3), (0, 3, 1), (3, 1, 3)])
def test_at_thresholds_of_1_the_distribution_is_the_targets(tokens):
    """Also for siblings with the same token, of which the second is never accepted, and for a child
    whose token was rejected one level above. Lossy thresholds are the negative control."""
    assert min(p_values(tokens)) > SIGNIFICANCE
    if tokens == (2, 1, 3):
        for thresholds in ({"acc": 0.8}, {"single": 0.3}):
            assert min(p_values(tokens, **thresholds)) < SIGNIFICANCE


# Faults and errors.


def test_faults_in_the_data():
    tree = {k: v[:3] for k, v in two_levels((2, 1, 3)).items()}
    tree["candidates"] = torch.tensor([[0, 9, -5, 1]] * 3)
    probs = torch.stack([ROOT, ROOT, CHILD, ROOT]).expand(3, -1, -1).clone()
    probs[1] = torch.nan
    probs[2] = 0.0
    out = drawn(tree, probs, torch.Generator().manual_seed(0))
    assert out["accept_token_num"].tolist() == [0, 0, 0]
    tokens = out["predicts"].view(3, 4)
    assert 0 <= tokens[0, 0] < 4
    assert tokens[1:, 0].tolist() == [-1, -1]
    assert (tokens[:, 1:] == -1).all()


def test_a_uniform_of_0_accepts_no_impossible_token_and_1_draws_the_last():
    tree = {k: v[:1] for k, v in two_levels((2, 1, 3)).items()}
    probs = CHILD.expand(1, 4, 4).contiguous()  # token 2 has no probability
    out = drawn(tree, probs, uniforms=(torch.zeros(1, 4), torch.ones(1)))
    assert out["accept_index"].tolist() == [[0, 2, 3, -1]]
    assert out["predicts"].tolist() == [1, -1, 3, 3]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("retrieve_index", torch.full((2, 6), 12), r"retrieve_index must be in \[0, 11\], got 12"),
        ("retrieve_index", torch.full((2, 6), -1), r"retrieve_index must be in \[0, 11\], got -1"),
        ("retrive_next_token", torch.full((2, 6), 6), r"must be in \[-1, 5\], got 6"),
        ("retrieve_next_sibling", torch.full((2, 6), -2), r"must be in \[-1, 5\], got -2"),
        ("threshold_single", 1.5, r"threshold_single must be in \[0, 1\], got 1.5"),
        ("threshold_acc", -0.1, r"threshold_acc must be in \[0, 1\], got -0.1"),
    ],
)
def test_links_and_thresholds_out_of_range_are_named(name, value, message):
    """Wrong types and shapes are in test_interfaces.py."""
    probs, out = torch.full((2, 6, 20), 0.05), outputs(2, 6, 4)
    given = {**EXAMPLE, "threshold_single": 1.0, "threshold_acc": 1.0, name: value}
    if name.startswith("retrive_"):
        del given[name.replace("retrive", "retrieve")]
    with pytest.raises(RuntimeError, match=message):
        tree_speculative_sampling_target_only(
            **out, **given, uniform_samples=torch.rand(2, 6), target_probs=probs,
            uniform_samples_for_final_sampling=torch.rand(2), draft_probs=probs * 0,
        )  # fmt: skip
    assert out["predicts"].eq(-1).all()


@pytest.fixture(scope="module")
def kernel():
    """SGLang's `chain_speculative_sampling_triton`, interpreted."""
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is decorated
    pytest.importorskip("triton")
    path = sglang_loops.path_of("sglang.kernels.ops.speculative.reject_sampling")
    spec = importlib.util.spec_from_file_location("reject_sampling_of_sglang", Path(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.chain_speculative_sampling_triton


@pytest.mark.skipif(sglang_loops.source() is None, reason="SGLang's files are not here")
@pytest.mark.triton
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_chain_is_decided_as_by_its_kernel(kernel, n, block):
    """Every output is equal; with other uniforms they are not."""
    b, v = 16, 13
    given = chain(b, n, v, torch.Generator().manual_seed(10 * n + block))
    spelled = {k.replace("retrieve_", "retrive_"): x for k, x in given.items()}
    want, got, other = (outputs(b, n, n) for _ in range(3))
    kernel(**want, **spelled, block_verification=block)
    chain_speculative_sampling_triton(**got, **spelled, block_verification=block)
    assert {k: t.tolist() for k, t in got.items()} == {k: t.tolist() for k, t in want.items()}
    spelled["uniform_samples_for_final_sampling"] = given["uniform_samples"][:, 0].contiguous()
    chain_speculative_sampling_triton(**other, **spelled, block_verification=block)
    assert other["predicts"].tolist() != want["predicts"].tolist()
