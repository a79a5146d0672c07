"""`check_rule` passes lossless rules written by hand, and fails rules that are wrong on purpose."""

import re

import pytest
import torch
from hf import own_rules
from hf.own_rules import WRONG, block_rule, multi_draft_rule, one_hot, token_rule
from specdec_hf import check_rule
from support import hf_models
from support.sources import ROOT

FEW = {"places": 24}
SAMPLED = {"sampled drafts", "more sampled drafts", "filtered, sampled drafts"}


def failed(check):
    return {finding.name for finding in check.findings if not finding.passed}


def draws_itself(P, Q, tokens, uniforms):
    accepted, following = token_rule(P, Q, tokens, uniforms)
    below = following.cumsum(0) <= uniforms[-1] * following.sum()
    return accepted, one_hot(following, below.sum().clamp(max=len(following) - 1))


def rounds(P, Q, tokens, uniforms):
    Q = None if Q is None else Q.float()
    return token_rule(P.float(), Q, tokens, uniforms.float())


RIGHT = {
    "token": token_rule,
    "block": block_rule,
    "multi_draft": multi_draft_rule,
    "token, and its draw": draws_itself,
    "token in float32": rounds,
}


@pytest.mark.parametrize("rule", RIGHT)
def test_lossless_rules_pass(rule):
    check = check_rule(RIGHT[rule], **FEW, trees=rule == "multi_draft")
    assert check.passed, str(check)
    largest = 1e-6 if "float32" in rule else 1e-11
    assert all(0 <= finding.distance < largest for finding in check.findings)
    assert all(finding.mean_accepted > 0 for finding in check.findings)
    if "float32" in rule:
        assert not check_rule(rounds, tolerance=1e-13, **FEW).passed


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rules_fail(wrong):
    check = check_rule(WRONG[wrong], **FEW)
    assert failed(check) >= SAMPLED
    assert all(f.distance > 1e-3 for f in check.findings if not f.passed), str(check)


def test_rules_that_are_wrong_in_one_place_fail_there():
    trees = check_rule(own_rules.no_tree_residual, trees=True, **FEW)
    assert {"sampled drafts", "deterministic drafts"} <= failed(trees)
    greedy = check_rule(own_rules.greedy_rule, **FEW)
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
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_rules_that_cannot_be_enumerated_fail_with_the_reason(fault):
    rule, message = FAULTS[fault]
    check = check_rule(rule, **FEW)
    assert not check.passed
    assert message in check.findings[-1].fault or message in check.findings[0].fault
    assert message in str(check)


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the documents are not beside the tests")
def test_the_printed_rules_run_and_print_what_the_page_says(capsys):
    """Without the distances, which are roundings."""
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
