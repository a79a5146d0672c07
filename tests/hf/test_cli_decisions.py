"""`--trace` says of drafts and trees what plain forwards give."""

import pytest
import torch
from specdec_hf import SpeculativeDecoder, Step
from specdec_hf.cli.decisions import COLUMNS
from specdec_hf.cli.explain import Explainer
from specdec_hf.cli.trace import ASCII_MARKS, render
from specdec_hf.runner.module_copy import copied
from specdec_hf.runner.packed.blocks import rounded_linear
from support import cli_models, hf_models
from support.cli_models import reported

from specdec_kernels.analysis import acceptance_uniforms

SAMPLING = {"temperature": 0.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
TEXT = "Say: the cat sat. The cat sat"
VOCAB = cli_models.END + 1


@pytest.fixture(scope="module")
def models():
    target = hf_models.build("llama", vocab_size=VOCAB)
    return target, hf_models.with_noise(target, 0.1)


def explained(models, rule, sampling=SAMPLING, tokenizer=None, **options):
    target, drafter = models
    tokenizer = tokenizer or cli_models.tokenizer()
    inputs = tokenizer(TEXT, return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    explainer = Explainer(tokenizer, inputs["input_ids"][0].tolist(), "drafty", sampling)
    rounds = []
    decoder = SpeculativeDecoder(
        drafter, rule=rule, guard=False, seed=5, **options,
        trace=lambda traced: (explainer(traced), rounds.append(traced)),
    )  # fmt: skip
    given = {**sampling, "do_sample": True} if sampling["temperature"] else {"do_sample": False}
    output = decoder.stream(target, **inputs, max_new_tokens=30, **given)
    answer = [token for step in output for token in step.tokens]
    return explainer, [*explainer.prompt, *answer], rounds


def probs(model, ids, temperature=SAMPLING["temperature"]):
    """The distribution after some ids, by one plain forward."""
    with torch.inference_mode():
        return (model(torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(-1)


def drafts(models, ids, *temperature):
    """That of the draft model, on the weights that it drafts with."""
    return probs(copied(models[1], rounded_linear), ids, *temperature)


@pytest.mark.parametrize("rule", ["token", "token-copied", "block", "match"])
def test_the_decisions_of_chains_are_those_of_plain_forwards(models, rule):
    rule, _, copied = rule.partition("-")
    sampling = {**SAMPLING, "temperature": 0.3}
    pair = (models[0], "suffix_automaton") if copied else models
    explainer, ids, _ = explained(pair, rule, sampling, num_assistant_tokens=3)
    kinds = set()
    for said in explainer.rounds:
        begin = said[0].position
        for token in said:
            kinds.add(token.kind)
            before = ids[: token.position]
            wanted = float(probs(models[0], before, 0.3)[token.token])
            assert token.p == pytest.approx(wanted, abs=1e-5)
            if token.drafter and copied:
                assert token.q == 1
            elif token.drafter and rule != "match":
                wanted = float(drafts(models, before, 0.3)[token.token])
                assert token.q == pytest.approx(wanted, abs=1e-5)
                # Negative control: the distribution one token later is another one.
                later = float(drafts(models, ids[: token.position + 1], 0.3)[token.token])
                assert token.q != pytest.approx(later, abs=1e-7)
            if rule == "match":
                assert (token.uniform, token.q) == (None, None)
            elif token.drafter:
                uniforms = acceptance_uniforms(torch.tensor([5]), torch.tensor([begin]), 3, rule)
                assert token.uniform == float(uniforms[0, token.position - begin])
            if rule == "token" and token.drafter:
                assert token.accept_prob == pytest.approx(min(1, token.p / token.q), rel=1e-4)
                assert (token.uniform < token.p / token.q) is (token.kind == "accepted")
    assert {"accepted", "recovered"} <= kinds
    emitted = [t for said in explainer.rounds for t in said if t.kind != "rejected"]
    assert [t.token for t in emitted] == ids[len(explainer.prompt) :]
    assert [t.position for t in emitted] == list(range(len(explainer.prompt), len(ids)))


def test_the_residual_of_a_recovered_token_is_that_of_its_row(models):
    explainer, _, rounds = explained(models, "token", num_assistant_tokens=4)
    checked = 0
    for said, traced in zip(explainer.rounds, rounds, strict=True):
        last, row = said[-1], len(said) - 2
        if last.kind == "recovered":
            p, q = (
                (logits[0, row].double() / SAMPLING["temperature"]).softmax(-1)
                for logits in (traced.logits, traced.distribution.logits)
            )
            residual = (p - q).clamp(min=0)
            wanted = float(residual[last.token] / residual.sum())
            assert last.residual == pytest.approx(wanted, rel=1e-4)
            end = float(residual[: last.token + 1].sum() / residual.sum())
            assert end - wanted - 1e-5 < last.uniform < end + 1e-5
            assert last.q == pytest.approx(float(q[last.token]), rel=1e-4)
            assert said[-2].unread == int((traced.draft_token_ids[0] >= 0).sum()) - row - 1
            checked += 1
    assert checked > 3


@pytest.mark.parametrize("rule", ["multi_draft", "greedy"])
def test_the_nodes_of_trees_are_those_of_plain_forwards(models, rule):
    sampling = SAMPLING if rule != "greedy" else {**SAMPLING, "temperature": 0.0}
    explainer, ids, _ = explained(models, rule, sampling, tree=(3, 1, 1))
    assert len(explainer.trees) > 3
    seen = set()
    for tree in explainer.trees:
        paths = {-1: []}
        siblings = {}
        for n, node in enumerate(tree.nodes):
            paths[n] = [*paths[node.parent], node.token]
            siblings.setdefault(node.parent, []).append(node)
            seen.add(node.kind)
        for n in range(0, len(tree.nodes), 4):
            node = tree.nodes[n]
            before = [*ids[: tree.position], *paths[node.parent]]
            p = probs(models[0], before)
            if rule == "greedy":
                assert node.p == float(node.token == int(p.argmax()))
                assert node.q is None
                continue
            assert node.p == pytest.approx(float(p[node.token]), abs=1e-5)
            q = float(drafts(models, before)[node.token])
            assert node.q == pytest.approx(q, abs=1e-5)
            if node is siblings[node.parent][0] and node.accept_prob is not None:
                assert node.accept_prob == pytest.approx(min(1, node.p / node.q), rel=1e-3)
        said = paths[tree.last]
        assert said == ids[tree.position :][: len(said)]
        spelled = [said[: d + 1] for d in range(len(said))]
        for n, node in enumerate(tree.nodes):  # nodes that spell one path are one
            assert (node.kind == "accepted") is (paths[n] in spelled)
        if tree.following is not None:
            assert tree.following.token == ids[tree.position + len(said)]
    assert all(token.text is not None for said in explainer.rounds for token in said)
    assert seen == {"accepted", "rejected", "drafted"}


def test_the_root_of_a_tree_is_written_as_behind_its_text():
    """Alone, a word has no blank before it."""
    tokenizer = cli_models.sentence_piece()
    target = hf_models.build("llama", vocab_size=len(tokenizer))
    one, other = tokenizer.convert_tokens_to_ids(["▁Hello", "▁the"])
    with torch.no_grad():
        target.lm_head.weight[torch.arange(len(tokenizer)) != one] = 0
        target.lm_head.weight[other] = -target.lm_head.weight[one]  # so it says these alone
    sampling = {**SAMPLING, "temperature": 0.0}
    explainer, ids, _ = explained((target,) * 2, "greedy", sampling, tokenizer, tree=(2, 1))
    shown = {one: " Hello", other: " the"}
    assert len(explainer.trees) > 3
    for tree in explainer.trees[1:]:
        assert tree.root == shown[ids[tree.position - 1]]


@pytest.mark.parametrize("options", [["--gamma", 3], ["--tree", "2,1"]], ids=["chain", "tree"])
def test_generate_prints_and_writes_every_decision(folder, tmp_path, options):
    report, result = reported(
        tmp_path, "generate", "--model", folder, "--prompt", TEXT, "--max-new-tokens", 12,
        "--drafter", "layers:1", "--guard", "off", "--temperature", 0.7, "--seed", 3, "--trace",
        "--no-compare", *options,
    )  # fmt: skip
    turn = report["prompts"][0]["turns"][0]
    said = [token for one in turn["rounds"] for token in one if token["kind"] != "rejected"]
    assert [token["token"] for token in said] == turn["tokens"]
    assert all(name in result.output for name in COLUMNS)  # the first round drafts nothing
    assert len(turn["trees"]) == result.output.count("accepted; root")
    assert bool(turn["trees"]) is ("--tree" in options)
    assert result.output.count("mask, 0 is the root") == ("--tree" in options)


def test_shown_tokens_of_one_kind_are_one_piece():
    tokenizer = cli_models.tokenizer()
    ids = tokenizer("cdef", add_special_tokens=False)["input_ids"]
    kinds = ["accepted", "plain", "accepted", "accepted"]
    steps = [Step(0, [token], [kind], [0.0]) for token, kind in zip(ids, kinds, strict=True)]
    assert render(tokenizer, steps).plain == "cdef"
    assert render(tokenizer, steps, marks=ASCII_MARKS).plain.count("ef") == 1
