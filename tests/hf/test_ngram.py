"""N-gram tables hold what brute force counts, and their drafters draw from it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from specdec_hf import generate
from specdec_hf.drafters.ngram import NgramDrafter, RandomDrafter
from specdec_hf.drafters.ngram_table import NgramTable
from specdec_hf.drafting.context import DraftContext
from support import hf_models
from support.cli_models import folder, invoke, one_line_error  # noqa: F401
from support.histories import history_of, propose
from support.providers import chi_square_of_counts

VOCAB = hf_models.VOCAB


def counted(texts, context, min_count=1):
    """Brute force: what follows a context in the texts."""
    found: Counter[int] = Counter()
    n = len(context)
    for text in texts:
        for i in range(len(text) - n):
            if text[i : i + n].tolist() == list(context):
                found[int(text[i + n])] += 1
    return {token: count for token, count in found.items() if count >= min_count}


def as_dict(followers):
    return dict(zip(*(part.tolist() for part in followers), strict=True))


@pytest.mark.parametrize("min_count", [1, 2])
def test_a_table_counts_as_brute_force_does(min_count, tmp_path):
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 5, size) for size in (60, 1, 0, 40)]
    made = NgramTable.build(texts, 5, 3, min_count)
    made.save(tmp_path / "table")
    for table in (made, NgramTable.load(tmp_path / "table")):
        assert (table.vocab_size, table.order) == (5, 3)
        for context in [
            (),
            *((a,) for a in range(5)),
            *((a, b) for a in range(5) for b in range(5)),
        ]:
            kept = all(context[-1] in counted(texts, context[:-1], min_count) for _ in context[:1])
            expected = counted(texts, context, min_count) if kept else {}
            assert as_dict(table.followers(context)) == expected, context
        assert as_dict(table.followers((1, 2, 3))) == {}
        assert as_dict(table.followers((9,))) == {}


def contexts(rule, batch_size=1, seeds=(0,)):
    return DraftContext(
        hf_models.tiny("llama"), rule, 1.0, 0, 1.0, 0.0, torch.tensor(seeds), batch_size, 100, 8
    )


def shares(drafter, text, draws=4000):
    """How often each token is drafted first, over many seeds."""
    drafter.start(contexts("token", draws, range(draws)))
    draft = propose(drafter, history_of(*[text] * draws), 1)
    return np.bincount(draft.tokens[:, 0].numpy(), minlength=VOCAB), draft


def test_drafts_are_drawn_as_often_as_the_table_counts():
    text = np.array([1, 2, 1, 3, 1, 2, 1, 2, 1, 4, 2, 1])
    table = NgramTable.build([np.array([1, 5, 1, 5, 1, 2])], VOCAB, 2)
    got, draft = shares(NgramDrafter(table), text)
    expected = np.zeros(VOCAB)
    expected[[2, 3, 4, 5]] = np.array([3 + 1, 1, 1, 2]) / 8
    seen = expected > 0
    assert got[~seen].sum() == 0
    assert chi_square_of_counts(got[seen], expected[seen] * got.sum()) > 1e-4
    # Negative control: the counts of the table alone.
    wrong = np.array([1, 2]) / 3
    assert chi_square_of_counts(got[[2, 5]], wrong * got[[2, 5]].sum()) < 1e-6
    rows = draft.distribution.logits[0, 0].double()
    assert torch.allclose(rows.exp() / rows.exp().sum(), torch.from_numpy(expected), atol=1e-6)


def test_random_drafts_are_uniform_at_every_temperature():
    drafter = RandomDrafter()
    got, _ = shares(drafter, np.array([1, 2]), 6700)
    assert chi_square_of_counts(got, got.mean()) > 1e-4
    context = contexts("greedy")
    context.temperature = 0.0
    drafter.start(context)
    tokens = propose(drafter, history_of([1, 2]), 8).tokens
    assert len(set(tokens[0].tolist())) > 4


def test_a_context_that_was_never_met_drafts_nothing():
    drafter = NgramDrafter(order=2)
    drafter.start(contexts("greedy", 2, (0, 1)))
    draft = propose(drafter, history_of([1, 2, 1], [1, 2, 3]), 4)
    assert draft.counts.tolist() == [4, 0]
    assert draft.tokens[0].tolist() == [2, 1, 2, 1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: table.tokens.__setitem__(1, table.tokens[1] + VOCAB),
        lambda table: table.tokens.__setitem__(1, -1 - table.tokens[1]),
        lambda table: table.tokens.__setitem__(1, table.tokens[1][:-1]),
        lambda table: table.counts.__setitem__(0, table.counts[0] - 1),
        lambda table: table.begins.__setitem__(1, table.begins[1] + 1),
        lambda table: table.begins.__setitem__(1, table.begins[1] * 1.0),
        lambda table: table.begins.__setitem__(1, table.begins[1][::-1].copy()),
        lambda table: table.tokens.pop(),
    ],
)
def test_a_damaged_table_is_refused(damage, tmp_path):
    table = NgramTable.build([np.array([1, 2, 1, 3])], VOCAB, 2)
    damage(table)
    table.counts, table.begins = (one[: table.order] for one in (table.counts, table.begins))
    table.save(tmp_path / "table")
    if table.order == 1:  # an order that its arrays lack
        data = (tmp_path / "table").read_bytes()
        (tmp_path / "table").write_bytes(data.replace(b'"order":"1"', b'"order":"2"'))
    with pytest.raises(ValueError, match=r"path must name a(n| valid) n-gram table, got"):
        NgramTable.load(tmp_path / "table")


def test_a_table_of_another_vocabulary_is_refused():
    table = NgramTable.build([np.array([1, 2])], VOCAB + 1, 2)
    with pytest.raises(ValueError, match="table must have the model's vocabulary of 67"):
        generate(hf_models.tiny("llama"), **hf_models.prompts((5,)), drafter=NgramDrafter(table))


def test_a_drafter_that_cannot_draft_a_tree_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"drafts several chains.* got ngram$"):
        generate(
            hf_models.tiny("llama"), **hf_models.prompts((5,)), drafter=NgramDrafter(), tree=(2, 2)
        )


def test_a_table_is_built_from_files_and_drafts(folder, tmp_path):  # noqa: F811
    text, table = tmp_path / "text", tmp_path / "table"
    text.write_text("one two one two\n" * 20)
    result = invoke("build", "ngram", text, "--output", table, "--model", folder)
    assert result.exit_code == 0, result.output
    assert "3-grams" in result.output
    wanted = ("--output", tmp_path / "none", "--model", folder, "--min-count", 10**6)
    assert "--min-count must be at most " in one_line_error("build", "ngram", text, *wanted)
    assert not (tmp_path / "none").exists()
    result = invoke(
        "generate", "--prompt", "one two", "--model", folder, "--drafter", f"ngram:{table}",
        "--max-new-tokens", 8,
    )  # fmt: skip
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--output", "x"], "FILES: cannot read nowhere"),
        (["README.md"], "Missing option '--output'"),
        (["README.md", "--output", "README.md"], "--output would overwrite the input file README"),
        (["README.md", "--output", "x", "--order", "9"], "--order must be in [1, 8], got 9"),
        (["README.md", "--output", "x", "--min-count", "0"], "--min-count must be at least 1"),
        (["README.md", "--output", "no/x"], "--output: folder no does not exist"),
        (["tests", "--output", "x"], "FILES: cannot read tests: Is a directory"),
    ],
)
def test_wrong_build_commands_are_one_line(arguments, message):
    assert message in one_line_error("build", "ngram", *arguments)
