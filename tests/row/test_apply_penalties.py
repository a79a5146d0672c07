"""`apply_penalties_` beside its reference, Transformers' processors and vLLM's formulas."""

import proofs
import pytest
import torch
from proofs import assert_bits, packed_bits
from support.providers import provider, run_case
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from specdec_kernels import Status, Tree, apply_penalties_, verify_chain, verify_tree

NAMES = ("cpp", "cuda")
V = 67


@pytest.mark.parametrize("case", proofs.cases("apply_penalties_", heavy=True), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_of_the_specification(name, case):
    for got, want in zip(run_case(case, name), run_case(case, "reference"), strict=True):
        assert_bits(got, want)


def lone_rows(parents, tokens, text):
    """(row, the text before it) for the root and every node of a tree."""
    paths = {-1: list(text)}
    for n, parent in enumerate(parents):
        paths[n] = [*paths[parent], tokens[n]]
    return [(n + 1, path) for n, path in paths.items()]


@pytest.mark.parametrize("tree", [False, True])
def test_each_row_equals_the_processors_of_transformers(tree):
    """Bit for bit, on float32 rows, with the drafts before a row as its text."""
    g = torch.Generator().manual_seed(5)
    prompt, output = [3, 9, 9, 40], [9, 12, 12]
    tokens = torch.tensor([[12, 3, 12, 50, 9]])
    parents = torch.tensor([[-1, -1, 0, 2, 0]]) if tree else torch.arange(-1, 4)[None]
    target = torch.randn(1, 6, V, generator=g) * 3
    bias, ends = {(12,): -2.5, (40,): 1.75, (7,): -torch.inf}, [50, 8]
    processors = LogitsProcessorList([
        SequenceBiasLogitsProcessor(bias),
        RepetitionPenaltyLogitsProcessor(1.4),
        MinNewTokensLengthLogitsProcessor(len(prompt), len(output) + 2, ends, device="cpu"),
    ])  # fmt: skip
    want = target.clone()
    for row, path in lone_rows(parents[0].tolist(), tokens[0].tolist(), prompt + output):
        want[0, row] = processors(torch.tensor([path]), target[0, row][None].clone())[0]
    counts = torch.bincount(torch.tensor(output), minlength=V)[None].int()
    apply_penalties_(
        target, Tree(tokens, parents) if tree else tokens, token_counts=counts,
        prompt_mask=packed_bits(torch.bincount(torch.tensor(prompt), minlength=V)[None] > 0),
        repetition_penalty=1.4, bias_ids=torch.tensor([[i for (i,) in bias]]),
        biases=torch.tensor([list(bias.values())]), min_new_tokens=torch.tensor([2]),
        eos_token_ids=torch.tensor(ends),
    )  # fmt: skip
    assert_bits(target, want)


def test_each_row_equals_the_formulas_of_vllm():
    """Frequency and presence beside repetition, of counts that grow along the drafts."""
    g = torch.Generator().manual_seed(6)
    target, tokens = torch.randn(2, 4, V, generator=g), torch.tensor([[5, 5, 60], [1, 2, 1]])
    counts = torch.randint(0, 3, (2, V), generator=g, dtype=torch.int32)
    prompt = torch.rand(2, V, generator=g) < 0.3
    repetition, presence, frequency = (torch.rand(2, generator=g) + 0.5 for _ in range(3))
    want = target.clone()
    for b in range(2):
        for i in range(4):
            bins = counts[b] + torch.bincount(tokens[b, :i], minlength=V)
            scale = torch.where(prompt[b] | (bins > 0), repetition[b], 1.0)
            row = torch.where(want[b, i] > 0, want[b, i] / scale, want[b, i] * scale)
            want[b, i] = row - frequency[b] * bins - presence[b] * (bins > 0)
    apply_penalties_(
        target, tokens, token_counts=counts, prompt_mask=packed_bits(prompt),
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency,
    )  # fmt: skip
    assert_bits(target, want)


@pytest.mark.parametrize("rule", ["match", "greedy"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_drafts_do_not_change_the_text_of_a_penalised_model(rule, shape):
    """Under rules that take the target's own choice: one round with drafts, and plain rounds."""
    g = torch.Generator().manual_seed(7)
    table = torch.randn(V, V, generator=g) * 2
    how = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2}
    seeds = torch.tensor([11])
    text, counts, at = [4], torch.zeros(1, V, dtype=torch.int32), 0
    while len(text) < 40:
        row = table[text[-1]][None, None].clone()
        empty = torch.zeros(1, 0, dtype=torch.int64)
        apply_penalties_(row, empty, token_counts=counts, **how)
        here = {"seeds": seeds, "positions": torch.tensor([at]), "rule": rule}
        text.append(int(verify_chain(row, empty, **here).tokens[0, 0]))
        counts[0, text[-1]] += 1
        at += 1
    plain, text, at = text, [4], 0
    counts.zero_()
    while len(text) < 40:
        right = plain[len(text) : len(text) + 3] + [0] * 3
        drafts = [[right[0], (right[1] + at // 3) % V, right[2]]]
        parents = [[-1, 0, 1]]
        if shape == "tree":
            drafts, parents = [[8, right[0], right[1], 9, right[2]]], [[-1, -1, 1, 1, 2]]
        tokens, parents = torch.tensor(drafts), torch.tensor(parents)
        rows = table[torch.tensor([[text[-1], *drafts[0]]])].clone()
        tree = Tree(tokens, parents)
        apply_penalties_(rows, tree, token_counts=counts, **how)
        here = {"seeds": seeds, "positions": torch.tensor([at]), "rule": rule}
        verdict = (
            verify_tree(rows, tree, **here)
            if shape == "tree"
            else verify_chain(rows, tokens, **here)
        )
        for token in verdict.tokens[0][verdict.tokens[0] >= 0].tolist():
            text.append(token)
            counts[0, token] += 1
            at += 1
    assert text[:40] == plain


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan, torch.inf])
def test_a_penalty_out_of_range_makes_the_rows_of_its_sequence_invalid(name, bad):
    case = proofs.penalty_case(3, 2, V)
    args = list(case.args())
    args[6] = torch.tensor([1.0, bad, 1.0])
    args[8] = args[10] = None
    provider("apply_penalties_", name)(*args)
    assert args[0].isnan().all(-1).tolist() == [[False] * 3, [True] * 3, [False] * 3]
    one = torch.zeros(3, dtype=torch.int64)
    status = verify_chain(args[0], args[1], seeds=one, positions=one).status
    assert status.tolist()[1] == Status.TARGET_INVALID


def test_a_leaf_that_requires_a_gradient_is_refused():
    target = torch.zeros(1, 1, V, requires_grad=True)
    with pytest.raises(RuntimeError, match="target must not be a leaf that requires a gradient"):
        apply_penalties_(target, torch.zeros(1, 0, dtype=torch.int64))


@pytest.mark.parametrize("name", NAMES)
def test_other_entries_and_rows_keep_their_bits(name):
    """What no text, draft, bias or end names, and rows of a ragged target beyond its sequences."""
    target = torch.full((5, V), torch.nan)
    target[0, 3] = target[3, 3] = 2.0
    before = target.clone()
    none = (None,) * 4
    provider("apply_penalties_", name)(
        target, torch.tensor([[3], [-7]]), None, torch.tensor([1, 3, 4]), *(None, None),
        *(None, 1.0, None, 0.5, None, 0.0), *none,
    )  # fmt: skip
    before[2, 3] = torch.nan
    assert_bits(target, before)
    target[2, 3] = 2.0
    provider("apply_penalties_", name)(
        target, torch.tensor([[3], [-7]]), None, torch.tensor([1, 3, 4]), *(None, None),
        *(None, 1.0, None, 0.5, None, 0.0), *none,
    )  # fmt: skip
    assert target[:, 3].tolist()[2] == 1.5
