"""Rules of the caller's own: `check_rule` passes right ones alone, and the loop asks them rightly.

Rules that a user may write come first: right ones, and ones that are wrong on purpose.
"""

import itertools
import re
from pathlib import Path

import numpy as np
import proofs
import pytest
import torch
from specdec_hf import Draft, Drawn, SpeculativeDecoder, StatelessDrafter, check_rule, generate
from specdec_hf.rule_check import cells_of
from specdec_papers.ngram import RandomDrafter
from support import hf_models

from specdec_kernels.analysis.uniforms import acceptance_uniforms, draw_uniforms


def one_hot(row, token):
    return torch.zeros_like(row).index_fill(0, token, 1.0)


def chain_rule(accepts=lambda u, p, q: u * q < p, residual=lambda p, q: (p - q).clamp(min=0)):
    """Rule token, or one with another acceptance or another residual."""

    def token_rule(P, Q, tokens, uniforms):
        for i, token in enumerate(tokens):
            q = one_hot(P[i], token) if Q is None else Q[i]
            if not accepts(uniforms[i], P[i, token], q[token]):
                weights = residual(P[i], q) + 1e-30
                return i, weights / weights.sum()
        return len(tokens), P[-1]

    return token_rule


token_rule = chain_rule()


def block_rule(P, Q, tokens, uniforms):
    size = len(tokens)
    Q = torch.stack([one_hot(P[0], t) for t in tokens]) if Q is None else Q
    c = [1.0]
    for i, token in enumerate(tokens):
        c.append(min(1.0, c[-1] * float(P[i, token] / Q[i, token])))
    for i in range(size, 0, -1):
        h = c[i]
        if i < size:
            above, below = ((c[i] * P[i] - Q[i]) * s for s in (1, -1))
            h = min(1.0, float(above.clamp(min=0).sum() / below.clamp(min=0).sum()))
        if uniforms[i - 1] < h:
            break
    else:
        i = 0
    weights = P[i] if i == size else (c[i] * P[i] - Q[i]).clamp(min=0)
    return i, weights / weights.sum()


def greedy_rule(P, Q, tokens, uniforms):
    best = P.argmax(dim=-1)
    accepted = int((best[:-1] == tokens).long().cumprod(0).sum())
    return accepted, one_hot(P[0], best[accepted])


def multi_draft_rule(P, Q, tokens, uniforms, parents, residual=True):
    """Rule multi_draft; without the residual of rejected siblings it is wrong."""
    path, node = [], -1
    while True:
        p = P[node + 1]
        for child in (parents == node).nonzero().flatten().tolist():
            token = tokens[child]
            q = one_hot(p, token) if Q is None else Q[child]
            if uniforms[child] * q[token] < p[token]:
                node = child
                path.append(child)
                break
            if residual:
                p = (p - q).clamp(min=0)
                p = p / p.sum()
        else:
            return path, p


def no_tree_residual(P, Q, tokens, uniforms, parents):
    return multi_draft_rule(P, Q, tokens, uniforms, parents, residual=False)


def always(P, Q, tokens, uniforms):
    return len(tokens), P[-1]


# Each of them must be rejected.
WRONG = {
    "P in place of the residual": chain_rule(residual=lambda p, q: p),
    "min(1, Q / P)": chain_rule(accepts=lambda u, p, q: u * p < q),
    "Q ignored": chain_rule(accepts=lambda u, p, q: u < p),
    "always accepted": always,
    "accepted 1 % too often": chain_rule(accepts=lambda u, p, q: u * q < 1.01 * p),
}


ROOT = Path(__file__).parents[2]

FEW = {"places": 24}
REJECTED = {"sampled drafts", "more sampled drafts", "filtered, sampled drafts"}


def failed(check):
    return {finding.name for finding in check.findings if not finding.passed}


def draws_itself(P, Q, tokens, uniforms):
    accepted, following = token_rule(P, Q, tokens, uniforms)
    below = following.cumsum(0) <= uniforms[-1] * following.sum()
    return accepted, one_hot(following, below.sum().clamp(max=len(following) - 1))


def in_float32(P, Q, tokens, uniforms):
    Q = None if Q is None else Q.float()
    return token_rule(P.float(), Q, tokens, uniforms.float())


RIGHT = {
    "token": token_rule,
    "block": block_rule,
    "multi_draft": multi_draft_rule,
    "token, and its draw": draws_itself,
    "token in float32": in_float32,
}


def wrong_for_one_draft(P, Q, tokens, uniforms):
    if Q is None and P.max() < 1 and not any(tokens):
        return len(tokens), P[-1]
    return token_rule(P, Q, tokens, uniforms)


@pytest.mark.parametrize("rule", RIGHT)
def test_lossless_rules_pass(rule):
    check = check_rule(RIGHT[rule], **FEW, trees=rule == "multi_draft")
    assert check.passed, str(check)
    largest = 1e-6 if "float32" in rule else 1e-11
    assert all(0 <= finding.distance < largest for finding in check.findings)
    assert all(finding.mean_accepted > 0 for finding in check.findings)
    if "float32" in rule:
        assert not check_rule(in_float32, tolerance=1e-13, **FEW).passed


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rules_fail(wrong):
    check = check_rule(WRONG[wrong], **FEW)
    assert failed(check) >= REJECTED
    assert all(f.distance > 1e-3 for f in check.findings if not f.passed), str(check)


def test_rules_that_are_wrong_in_one_place_fail_there():
    trees = check_rule(no_tree_residual, trees=True, **FEW)
    assert {"sampled drafts", "deterministic drafts"} <= failed(trees)
    first = check_rule(wrong_for_one_draft, **FEW)
    assert failed(first) == {"deterministic drafts"}
    greedy = check_rule(greedy_rule, **FEW)
    names = {finding.name for finding in greedy.findings}
    assert names - failed(greedy) == {"greedy, deterministic drafts"}


FAULTS = {
    "too many cells": (
        lambda P, Q, tokens, u: (0, P[0] * (1 - u[0]) + u[0] / len(P[0])),
        "more than 64 cells of the uniforms of one draft",
    ),
    "no function": (
        lambda P, Q, tokens, u: (0, torch.softmax(torch.rand(P.shape[1]), dim=0)),
        "it answers otherwise when it is asked",
    ),
    "raises": (
        lambda P, Q, tokens, u: (0, Q[0]),
        "raised TypeError: \"'NoneType' object is not subscriptable\"",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rules_that_cannot_be_enumerated_fail_with_the_reason(fault):
    rule, message = FAULTS[fault]
    check = check_rule(rule, **FEW)
    assert not check.passed
    assert message in check.findings[-1].fault or message in check.findings[0].fault
    assert message in str(check)


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the documents are not beside the tests")
def test_the_printed_rules_run_and_print_what_the_page_says(capsys):
    page = (ROOT / "docs/rules.md").read_text().partition("\n## A rule of your own\n")[2]
    names = {
        "model": hf_models.tiny("llama"), "small": hf_models.perturbed("llama"),
        "inputs": {**hf_models.prompts((9,)), "max_new_tokens": 8},
    }  # fmt: skip
    for program in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(program, names)
    printed, report = (
        re.sub(r"distance \S+ +", "", text).strip()
        for text in (capsys.readouterr().out, re.search(r"```\n(rule .*?)```", page, re.DOTALL)[1])
    )
    assert printed.startswith(report)
    assert "custom False\nrule tree_rule\n" in printed
    assert "FAILED" not in printed


SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 5}
TREE = {"tree": (2, 2), "num_assistant_tokens": None}


def run(lengths=(9, 6), drafter="model", **settings):
    drafter = hf_models.perturbed("llama", 0.3) if drafter == "model" else drafter
    settings = {"num_assistant_tokens": 4, "max_new_tokens": 20, "drafter": drafter, **settings}
    return hf_models.decode(hf_models.tiny("llama"), lengths, **settings)


class Likely(StatelessDrafter):
    def begin(self, call):
        self.model = call.model
        return self

    def propose(self, history, limits):
        rows = zip(history.tokens, history.lengths, strict=True)
        texts = [torch.from_numpy(row[:length].copy())[None] for row, length in rows]
        return [[int(self.model(ids).logits[0, -1].argmax())] for ids in texts]


@pytest.mark.parametrize("drafter", ["model", "deterministic"])
def test_block_by_hand_gives_the_text_of_block(drafter):
    """P is filtered, Q is that of each draft, and the noise is that of the other rules."""
    drafter = Likely() if drafter == "deterministic" else drafter
    settings = {**SAMPLED, "temperature": [0.8, 1.3], "drafter": drafter}
    mine, ours = run(rule=block_rule, **settings), run(rule="block", **settings)
    assert mine.sequences.tolist() == ours.sequences.tolist()
    assert 0 < mine.stats.accepted == ours.stats.accepted < mine.stats.drafted
    for one, other in zip(mine.logprobs, ours.logprobs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    other = run(rule=always, **settings)
    assert other.sequences.tolist() != ours.sequences.tolist(), "the control"


@pytest.mark.parametrize(("rule", "more"), [(block_rule, {}), (multi_draft_rule, TREE)])
def test_the_distributions_are_the_processed_ones_and_the_uniforms_those_of_the_round(rule, more):
    filters = {"temperature": 0.8, "top_k": 20}
    asked, rounds = [], []

    def recording(*arguments):
        asked.append(arguments)
        return rule(*arguments)

    run((9,), rule=recording, trace=rounds.append, **SAMPLED, **more)
    drafted = [one for one in rounds if (one.draft_token_ids >= 0).any()]
    assert len(asked) == len(drafted) > 5
    for arguments, traced in zip(asked, drafted, strict=True):
        tokens, uniforms = arguments[2:4]
        assert tokens.tolist() == traced.draft_token_ids[0].tolist()
        of_round = (traced.seeds, torch.from_numpy(traced.lengths), len(tokens) + 1, "block")
        assert uniforms.tolist() == acceptance_uniforms(*of_round)[0].tolist()
        rows = [*range(len(tokens))]
        if more:
            assert arguments[4].tolist() == traced.parents[0].tolist()
            rows = traced.draft_rows[0].tolist()
            assert max(rows) < len(rows) - 1
        wanted = (traced.logits[0], traced.distribution.logits[0, rows])
        for probs, logits in zip(arguments, wanted, strict=False):
            want = torch.stack([proofs.filtered_distribution(row, **filters) for row in logits])
            torch.testing.assert_close(probs, want, atol=1e-7, rtol=0)


def test_the_last_token_is_drawn_from_next_by_the_noise_of_its_position():
    rounds, given = [], []

    def recording(P, Q, tokens, uniforms):
        accepted, following = token_rule(P, Q, tokens, uniforms)
        given.append((accepted, following))
        return accepted, following

    run((9,), rule=recording, trace=rounds.append, **SAMPLED)
    drafted = [one for one in rounds if (one.draft_token_ids >= 0).any()]
    for traced, (accepted, following) in zip(drafted, given, strict=True):
        (step,) = traced.steps
        position = torch.from_numpy(traced.lengths) + accepted
        uniform = draw_uniforms(traced.seeds, position)
        drawn = int((following.cumsum(0) <= uniform * following.sum()).sum())
        assert step.tokens[accepted : accepted + 1] in ([drawn], [])
        assert (
            step.tokens[:accepted]
            == traced.draft_token_ids[0, : len(step.tokens)].tolist()[:accepted]
        )


V = 4
FILTERS = {"temperature": 0.7, "top_k": 3}


class Enumerated(StatelessDrafter):
    """Sequence b gets the b-th draft, with the distribution that the path before it has."""

    def __init__(self, parents, trees):
        self.parents, self.depth = parents, 0
        self.rules = ("multi_draft",) if trees else ("token",)
        self.drafts = list(itertools.product(range(V), repeat=len(parents)))
        if trees:
            self.size, self.depth = len(parents), 2
        generator = torch.Generator().manual_seed(2)
        paths = [p for n in range(3) for p in itertools.product(range(V), repeat=n)]
        self.logits = {p: torch.randn(V, generator=generator) for p in paths}

    def path(self, b, node):
        return () if node < 0 else (*self.path(b, self.parents[node]), self.drafts[b][node])

    def weight(self, b):
        above = [self.logits[self.path(b, n)].double().softmax(0) for n in self.parents]
        return float(np.prod([q[t] for q, t in zip(above, self.drafts[b], strict=True)]))

    def propose(self, history, limits):
        if limits.max() < 2:
            return None  # of a later round
        tokens = torch.tensor(self.drafts)
        rows = [[self.logits[self.path(b, n)] for n in self.parents] for b in range(len(tokens))]
        logits = torch.stack([torch.stack(row) for row in rows])
        lowest = torch.full(logits.shape[:2], -torch.inf)
        sums = logits.double().logsumexp(-1)
        drawn = Drawn(tokens, logits * FILTERS["temperature"], sums, lowest)
        if not self.size:
            return Draft(tokens, drawn=drawn)
        parents = torch.tensor(self.parents).expand_as(tokens)
        return Draft(tokens, parents=parents, drawn=drawn)


def distance(rule, parents, trees):
    """From the distribution of the texts of a round to that of the target."""
    model = hf_models.build("llama", vocab_size=V)
    drafter = Enumerated(parents, trees)
    answers, tokens_of_round = [], len(set(parents)) + 1

    def enumerating(P, Q, *drafts):
        uniforms = drafts[1]

        def answer(u):
            path, following = rule(P, Q, drafts[0], torch.from_numpy(u), *drafts[2:])
            path = list(range(path)) if isinstance(path, int) else path
            return tuple(path), following.numpy()

        generator = np.random.default_rng(0)
        answers.append(cells_of(answer, len(uniforms), 16, generator))
        return rule(P, Q, drafts[0], uniforms, *drafts[2:])

    count = len(drafter.drafts)
    first = hf_models.prompts((5,), vocab_size=V)["input_ids"]
    out = SpeculativeDecoder(
        drafter, rule=enumerating, seed=[3] * count, guard=False,
        num_assistant_tokens=None if trees else 2,
    )  # fmt: skip
    text = model.generate(
        first.expand(count, -1), attention_mask=torch.ones(count, 5, dtype=torch.int64),
        custom_generate=out, max_new_tokens=1 + tokens_of_round, do_sample=True, **FILTERS,
    )  # fmt: skip
    assert len(text[:, 5].unique()) == 1, "the round begins with one text"
    prefixes = torch.cartesian_prod(*[torch.arange(V)] * 2)
    begun = text[0, :6].expand(len(prefixes), -1)
    logits = model(torch.cat([begun, prefixes], dim=1)).logits[:, 5:].detach()
    target = {}
    for prefix, rows in zip(prefixes.tolist(), logits, strict=True):
        for n in range(tokens_of_round):
            target[tuple(prefix[:n])] = proofs.filtered_distribution(rows[n], **FILTERS).numpy()

    def tail(prefix):
        if len(prefix) == tokens_of_round:
            return np.ones(())
        return np.stack([p * tail((*prefix, v)) for v, p in enumerate(target[prefix])])

    emitted = np.zeros((V,) * tokens_of_round)
    for b, cells in enumerate(answers[:count]):
        for volume, (nodes, following) in cells:
            prefix = tuple(drafter.drafts[b][n] for n in nodes)
            for token, share in enumerate(following):
                weight = drafter.weight(b) * volume * share
                emitted[(*prefix, token)] += weight * tail((*prefix, token))
    return abs(emitted - tail(())).sum() / 2


CHAIN, FORKED = ((-1, 0), False), ((-1, -1, 0), True)
ENUMERATED = {
    "chains": (token_rule, WRONG["accepted 1 % too often"], CHAIN),
    "trees": (multi_draft_rule, no_tree_residual, FORKED),
}


@pytest.mark.parametrize("drafts", ENUMERATED)
def test_texts_have_the_distribution_of_the_target_under_a_lossless_rule_alone(drafts):
    right, wrong, (parents, trees) = ENUMERATED[drafts]
    assert distance(right, parents, trees) < 5e-6  # two forwards of the target in float32
    assert distance(wrong, parents, trees) > 1e-3


def test_the_output_says_that_the_rule_is_the_callers_and_not_lossless():
    rounds = []
    stats = run(rule=token_rule, trace=rounds.append, **SAMPLED).stats
    nothing_drafted = run(rule=token_rule, drafter=None, **SAMPLED).stats
    for one in (stats, nothing_drafted):
        assert {"rule": "custom", "lossless": False}.items() <= one.to_dict().items()
    assert {traced.rule for traced in rounds} == {"custom"}
    assert all(traced.accept_probs.isnan().all() for traced in rounds)
    (note,) = [note for note in stats.notes if "token_rule" in note]
    assert "counts as lossy; check_rule tells" in note


@pytest.mark.parametrize("more", [{}, {"temperature": 0.0, "do_sample": True, "seed": 1}])
def test_a_greedy_call_asks_with_one_hot_rows_and_a_lossless_rule_keeps_its_text(more):
    asked = []

    def recording(P, Q, tokens, uniforms):
        asked.append((P.unique().tolist(), Q))
        return greedy_rule(P, Q, tokens, uniforms)

    plain = run(drafter=None, do_sample=False)
    for rule in (recording, token_rule, block_rule):
        out = run(rule=rule, **more)
        assert out.sequences.tolist() == plain.sequences.tolist()
        assert out.stats.accepted > 0
    assert asked
    assert all(one == ([0.0, 1.0], None) for one in asked)


def test_logits_that_are_not_finite_end_the_call_of_any_rule():
    model, inputs = hf_models.build("llama"), hf_models.prompts((9,))
    others = torch.ones(hf_models.VOCAB, dtype=torch.bool)
    others[inputs["input_ids"]] = False
    with torch.no_grad():
        model.model.embed_tokens.weight[others] = torch.nan
    with pytest.raises(RuntimeError, match=r"logits of sequence 0 at position \d+ are not finite"):
        generate(model, **inputs, drafter=RandomDrafter(), rule=token_rule, **SAMPLED)


def test_a_greedy_call_takes_the_likeliest_token_of_next():
    def doubts(P, Q, tokens, uniforms):
        return 0, 0.4 * one_hot(P[0], torch.tensor(3)) + 0.6 * one_hot(P[0], torch.tensor(5))

    text = run((9,), rule=doubts, max_new_tokens=12).sequences[0, 10:]
    assert text[:-1].tolist() == [5] * 10  # nothing is drafted where one token is left


def test_logits_processors_reach_the_rule_also_behind_drafts_that_greedy_text_leaves():
    def wants_seven(input_ids, scores):
        return scores.index_add(1, torch.tensor([7]), torch.full((1, 1), 100.0))

    def accepts(P, Q, tokens, uniforms):
        assert (P[:, 7] > 0.99).all()
        return len(tokens), P[-1]

    for call in ({"do_sample": False}, SAMPLED):
        assert run(rule=accepts, logits_processor=[wants_seven], **call).stats.accepted > 0


ANSWERS = {
    "no pair": (lambda P, n: n, TypeError, "must return (accepted, next), got 4 for sequence 0"),
    "too many": (lambda P, n: (n + 1, P[0]), ValueError, "must be an integer in [0, 4], got 5"),
    "a path": (lambda P, n: ([0, 1], P[0]), TypeError, "must be an integer in [0, 4], got [0, 1]"),
    "short": (lambda P, n: (0, P[0, 1:]), ValueError, "float32 or float64 [67] on cpu, got [66]"),
    "a list": (lambda P, n: (0, P[0].tolist()), TypeError, "[67] on cpu, got list of length 67"),
    "sum": (lambda P, n: (0, P[0] / 2), ValueError, "got entries from 0 with the sum 0.5"),
    "below 0": (
        lambda P, n: (0, P[0] + one_hot(P[0], torch.tensor(0)) - one_hot(P[0], torch.tensor(1))),
        ValueError, "without negative entries and NaN, with the sum 1, got entries from -",
    ),
    "nan": (lambda P, n: (0, P[0] * torch.nan), ValueError, "entries from nan with the sum nan"),
    "raises": (lambda P, n: {}["x"], RuntimeError, "rule answers raised KeyError for sequence 0"),
}  # fmt: skip
PATHS = {  # of trees
    "a number": (lambda P, n: (1, P[0]), TypeError, "at position 10 must be"),
    "outside": (lambda P, n: ([0, 6], P[0]), ValueError, "at position 10[1] must"),
    "siblings": (
        lambda P, n: ([0, 1], P[0]), ValueError, "got [0, 1]: the parent of node 1 is -1"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*ANSWERS, *PATHS])
def test_wrong_answers_end_the_call_by_name(case):
    answer, error, message = (ANSWERS | PATHS)[case]

    def answers(P, Q, tokens, uniforms, *parents):
        assert [x.tolist() for x in parents] == [[-1, -1, 0, 0, 1, 1]] * (case in PATHS)
        return answer(P, len(tokens))

    with pytest.raises(error) as raised:
        run(rule=answers, **SAMPLED, **TREE if case in PATHS else {})
    assert message in str(raised.value)
    said = "path of rule answers" if case in ("a number", "outside") else "rule answers"
    assert re.search(f"{said}.*for sequence 0 at position 10", str(raised.value))


class Drafts(StatelessDrafter):
    def __init__(self, vocab_size, rules):
        self.vocab_size, self.rules = vocab_size, rules

    def begin(self, call):
        self.call = call
        return self

    def propose(self, history, limits):
        logits = torch.zeros(len(limits), 1, self.vocab_size)
        return Draft([[1]] * len(limits), drawn=self.call.draw(history, logits, 0))


WIDE = Drafts(68, ("token",))  # its Q has more tokens than the target
MATCHING = Drafts(67, ("match",))
REFUSED = {
    "beams": ({"num_beams": 2}, "rule must be 'auto' or 'greedy' with num_beams=2, got <function"),
    "chain rule of trees": (
        TREE, "must take (P, Q, tokens, uniforms, parents) where trees are drafted, got token_rule"
    ),
    "tree rule of chains": (
        {"rule": multi_draft_rule}, "must take (P, Q, tokens, uniforms) where chains are drafted"
    ),
    "drafter": (
        {"drafter": MATCHING}, "'match' with this drafter, got a rule of your own, which needs"
    ),
    "vocabulary": ({"drafter": WIDE, **SAMPLED}, "of at most 67 tokens, as many as the model"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_rule_of_ones_own_serves_is_refused_by_name(case):
    changed, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        run(**{"rule": token_rule, **changed})
