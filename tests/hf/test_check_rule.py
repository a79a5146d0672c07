"""`check_rule` passes lossless rules written by hand, and fails rules that are wrong on purpose."""

import re

import pytest
import torch
from specdec_hf import check_rule
from support import hf_models, own_rules
from support.own_rules import WRONG, one_hot, token_rule
from support.sources import ROOT

FEW = {"places": 24}


def failed(check):
    return {finding.name for finding in check.findings if not finding.passed}


RIGHT = {
    "token": (own_rules.token_rule, {}),
    "block": (own_rules.block_rule, {}),
    "multi_draft": (own_rules.multi_draft_rule, {"trees": True}),
}


@pytest.mark.parametrize("rule", RIGHT)
def test_lossless_rules_pass(rule):
    function, options = RIGHT[rule]
    check = check_rule(function, **FEW, **options)
    assert check.passed, str(check)
    assert all(0 <= finding.distance < 1e-11 for finding in check.findings)
    assert all(finding.mean_accepted > 0 for finding in check.findings)


def test_block_accepts_more_than_token():
    found = {}
    for rule in (own_rules.token_rule, own_rules.block_rule):
        found[rule.__name__] = [one.mean_accepted for one in check_rule(rule, **FEW).findings]
    pairs = list(zip(found["token_rule"], found["block_rule"], strict=True))
    assert all(token <= block + 1e-11 for token, block in pairs)
    assert pairs[0][0] < pairs[0][1] - 1e-3


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rules_fail(wrong):
    check = check_rule(WRONG[wrong], **FEW)
    assert {"sampled drafts", "more sampled drafts", "filtered, sampled drafts"} <= failed(check)
    assert all(f.distance > 1e-3 for f in check.findings if not f.passed), str(check)


def test_wrong_rules_of_trees_fail():
    check = check_rule(own_rules.no_tree_residual, trees=True, **FEW)
    assert {"sampled drafts", "deterministic drafts"} <= failed(check)


def test_a_greedy_rule_is_lossless_in_greedy_calls_alone():
    check = check_rule(own_rules.greedy_rule, **FEW)
    names = {finding.name for finding in check.findings}
    assert names - failed(check) == {"greedy, deterministic drafts"}


def test_who_reads_no_distribution_is_lossless_with_the_residual_of_a_one_hot_one():
    assert check_rule(lambda P, Q, tokens, u: token_rule(P, None, tokens, u), **FEW).passed


def test_a_rule_may_draw_the_next_token_itself():
    def draws(P, Q, tokens, uniforms):
        accepted, following = token_rule(P, Q, tokens, uniforms)
        below = following.cumsum(0) <= uniforms[-1] * following.sum()
        return accepted, one_hot(following, below.sum().clamp(max=len(following) - 1))

    assert check_rule(draws, **FEW).passed


def test_a_rule_that_computes_in_float32_is_within_the_tolerance():
    def rounds(P, Q, tokens, uniforms):
        Q = None if Q is None else Q.float()
        return token_rule(P.float(), Q, tokens, uniforms.float())

    check = check_rule(rounds, **FEW)
    assert check.passed, str(check)
    assert not check_rule(rounds, tolerance=1e-13, **FEW).passed


def changes_with_a_uniform(P, Q, tokens, uniforms):
    return 0, P[0] * (1 - uniforms[0]) + uniforms[0] / len(P[0])


def answers_at_random(P, Q, tokens, uniforms):
    return 0, torch.softmax(torch.rand(P.shape[1]), dim=0)


def raises(P, Q, tokens, uniforms):
    return 0, Q[0]


def halves(P, Q, tokens, uniforms):
    return 0, P[0] / 2


FAULTS = {
    "too many cells": (changes_with_a_uniform, "more than 64 cells of the uniforms of one draft"),
    "no function": (answers_at_random, "it answers otherwise when it is asked"),
    "raises": (raises, "rule raises raised TypeError: \"'NoneType' object is not subscriptable\""),
    "no distribution": (halves, "with the sum 1, got entries from"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rules_that_cannot_be_enumerated_fail_with_the_reason(fault):
    rule, message = FAULTS[fault]
    check = check_rule(rule, **FEW)
    assert not check.passed
    assert message in check.findings[-1].fault or message in check.findings[0].fault
    assert message in str(check)


def test_the_report_says_what_was_tried_and_the_cases_are_those_of_the_seed():
    check = check_rule(token_rule, places=40)
    first, *rows, last = str(check).splitlines()
    assert (first, len(rows)) == ("rule token_rule", len(check.findings))
    assert last.endswith("what changes in less than 5.0% of one may be missed")
    assert rows[0].startswith("sampled drafts   ")
    assert rows[0].endswith("passed")
    accepted = [finding.mean_accepted for finding in check.findings]
    other = [finding.mean_accepted for finding in check_rule(token_rule, places=9).findings]
    assert accepted == pytest.approx(other, abs=1e-9)
    assert check_rule(token_rule, places=9, seed=1).findings[0].mean_accepted != other[0]


def columns(report):
    """A report without its distances."""
    return re.sub(r"distance \S+ +", "", report).strip()


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the documents are not beside the tests")
def test_the_printed_rules_run_and_print_what_the_page_says(capsys):
    page = (ROOT / "docs/rules.md").read_text().partition("\n## A rule of your own\n")[2]
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {
        "model": hf_models.tiny("llama"), "small": hf_models.perturbed("llama"),
        "inputs": {**hf_models.prompts((9,)), "max_new_tokens": 8},
    }  # fmt: skip
    for program in programs:
        exec(program, names)
    printed = capsys.readouterr().out
    report = re.search(r"```\n(rule .*?)```", page, re.DOTALL)[1]
    assert columns(printed).startswith(columns(report))
    assert "custom False\nrule tree_rule\n" in printed
    assert "FAILED" not in printed
