"""The option ``--trace``: what it says of drafts and trees equals plain forwards of both models."""

import io
import json

import pytest
import torch
from rich.console import Console
from specdec_hf import SpeculativeDecoder
from specdec_hf.cli.decisions import COLUMNS, draw_mask, draw_tree, ratio
from specdec_hf.cli.explain import Explained, ExplainedTree, Explainer, Node
from specdec_hf.cli.trace import MARKS
from support import cli_models, hf_models
from support.cli_models import folder, invoke  # noqa: F401
from support.hf_models import one_thread  # noqa: F401  # autouse here

from specdec_kernels import tree_attention
from specdec_kernels.analysis import acceptance_uniforms

SAMPLING = {"temperature": 0.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
TEXT = "Say: the cat sat. The cat sat"
VOCAB = cli_models.END + 1


@pytest.fixture(scope="module")
def models():
    """A target and a drafter that often agrees with it, of the byte tokenizer's vocabulary."""
    target = hf_models.build("llama", vocab_size=VOCAB)
    return target, hf_models.with_noise(target, 0.1)


def explained(models, rule, sampling=SAMPLING, **options):
    """The explainer of one answer, and the ids of prompt and answer."""
    target, drafter = models
    tokenizer = cli_models.tokenizer()
    inputs = tokenizer(TEXT, return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    explainer = Explainer(tokenizer, inputs["input_ids"][0].tolist(), "drafty", sampling)
    decoder = SpeculativeDecoder(
        drafter, rule=rule, guard=False, seed=5, trace=explainer, **options
    )
    given = {**sampling, "do_sample": True} if sampling["temperature"] else {"do_sample": False}
    output = decoder.stream(target, **inputs, max_new_tokens=30, **given)
    answer = [token for step in output for token in step.tokens]
    return explainer, [*explainer.prompt, *answer]


def probs(model, ids, temperature=SAMPLING["temperature"]):
    """The distribution after some ids, by one plain forward."""
    with torch.inference_mode():
        return (model(torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(-1)


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_the_decisions_of_chains_are_those_of_plain_forwards(models, rule):
    explainer, ids = explained(models, rule, num_assistant_tokens=3)
    kinds = set()
    for said in explainer.rounds:
        begin = said[0].position
        for token in said[::2]:
            kinds.add(token.kind)
            before = ids[: token.position]
            assert token.p == pytest.approx(float(probs(models[0], before)[token.token]), abs=1e-5)
            if token.drafter and rule != "match":
                wanted = float(probs(models[1], before)[token.token])
                assert token.q == pytest.approx(wanted, abs=1e-5)
                # Negative control: the distribution one token later is another one.
                later = float(probs(models[1], ids[: token.position + 1])[token.token])
                assert token.q != pytest.approx(later, abs=1e-7)
            if rule == "match":
                assert (token.uniform, token.q) == (None, None)
            elif token.drafter:
                uniforms = acceptance_uniforms(torch.tensor([5]), torch.tensor([begin]), 3, rule)
                assert token.uniform == float(uniforms[0, token.position - begin])
            if rule == "token" and token.drafter:
                assert (token.uniform < token.p / token.q) is (token.kind == "accepted")
    assert {"accepted", "recovered"} <= kinds
    emitted = [t for said in explainer.rounds for t in said if t.kind != "rejected"]
    assert [t.token for t in emitted] == ids[len(explainer.prompt) :]
    assert [t.position for t in emitted] == list(range(len(explainer.prompt), len(ids)))


@pytest.mark.parametrize("rule", ["multi_draft", "greedy"])
def test_the_nodes_of_trees_are_those_of_plain_forwards(models, rule):
    sampling = SAMPLING if rule != "greedy" else {**SAMPLING, "temperature": 0.0}
    explainer, ids = explained(models, rule, sampling, tree=(3, 1, 1))
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
            q = float(probs(models[1], before)[node.token])
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
            rejected = [t.token for t in explainer.rounds[tree.round - 1] if t.kind == "rejected"]
            below = [node.token for n, node in enumerate(tree.nodes) if paths[node.parent] == said]
            recovered = tree.following.kind == "recovered"
            assert rejected == (list(dict.fromkeys(below)) if recovered else [])
    assert seen == {"accepted", "rejected", "drafted"}


def test_rule_traversal_accepts_one_of_equal_siblings(models):
    explainer, _ = explained(models, "traversal", {**SAMPLING, "temperature": 0.1}, tree=(3, 2, 1))
    twins = 0
    for tree in explainer.trees:
        accepted = [node for node in tree.nodes if node.kind == "accepted"]
        parents = [node.parent for node in accepted]
        assert len({*parents}) == len(parents)
        twins += sum(
            (a.token, a.parent) == (b.token, b.parent)
            for a in accepted for b in tree.nodes if b is not a
        )  # fmt: skip
    assert twins > 0


def test_the_mask_of_a_picture_is_that_of_the_op(models):
    explainer, _ = explained(models, "target_only", tree=(3, 2, 1))
    tree = explainer.trees[0]
    parents = torch.tensor([[node.parent for node in tree.nodes]])
    # The op's mask covers the committed tokens too, here none.
    mask, _ = tree_attention(parents, torch.tensor([0]), slots=len(tree.nodes) + 1)
    assert tree.mask == mask[0].tolist()
    drawn = draw_mask(tree).plain.splitlines()
    assert [line.count("■") for line in drawn[1:]] == mask[0].sum(-1).tolist()


NODES = [
    Node(5, " cat", -1, "accepted", 0.5, 0.25, 1.0),
    Node(6, "\x1b", -1, "drafted", 0.125, 0.5),
    Node(7, " sat", 0, "rejected", 0.0005, 0.5, 0.001),
]
TREE = ExplainedTree(4, 31, " the", NODES, 0, Explained(9, " on", "recovered", 0.75, position=32))


def lines_of(tree):
    console = Console(width=100, file=io.StringIO())
    console.print(tree)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_tree_is_drawn_with_the_verdict_of_each_node():
    first, cat, sat, on, other = lines_of(draw_tree(TREE, MARKS))
    assert first == "round 4, position 31: 3 nodes, 1 accepted; root  the"
    assert cat == "├── 1  «cat»  accepted, P 0.5000, Q 0.2500, accept 1.0000"
    assert sat == "│   ├── 3  ×sat×  rejected, P 5.00e-04, Q 0.5000, accept 0.0010"
    assert on == "│   └──  ‹on›  recovered, P 0.7500"
    assert other == "└── 2 ␛  not looked at, P 0.1250, Q 0.5000"


def test_nodes_that_are_parts_of_a_character_are_shown_as_one_sign():
    explainer = Explainer(cli_models.tokenizer(), [], "drafty", SAMPLING)
    first, second, third, last = explainer.tokenizer("😄").input_ids
    a = explainer.tokenizer("a").input_ids[0]
    unfinished = "\N{REPLACEMENT CHARACTER}"
    assert explainer._piece([a], [first]) == unfinished
    assert explainer._piece([a, first], [second]) == unfinished
    assert explainer._piece([a, first, second, third], [last]) == "😄"
    assert explainer._piece([a, first], [a]) == "a"


def test_masks_that_are_too_wide_are_told_of():
    nodes = [Node(1, "a", n - 1, "drafted", 0.1) for n in range(60)]
    wide = ExplainedTree(1, 0, "", nodes, -1, None)
    assert draw_mask(wide).plain == "mask of 61 rows, which is too wide to draw"


def test_ratios_of_impossible_drafts():
    assert [ratio(0.5, 0.25), ratio(0.5, None), ratio(0.5, 0.0)] == ["2.0000", "", "inf"]


@pytest.mark.parametrize("options", [["--gamma", 3], ["--tree", "2,1"]], ids=["chain", "tree"])
def test_generate_prints_and_writes_every_decision(folder, tmp_path, options):  # noqa: F811
    path = tmp_path / "out.json"
    result = invoke(
        "generate", "--model", folder, "--prompt", TEXT, "--max-new-tokens", 12, "--drafter",
        "layers:1", "--guard", "off", "--temperature", 0.7, "--seed", 3, "--trace", "--no-compare",
        "--json", path, *options,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    turn = json.loads(path.read_text())["prompts"][0]["turns"][0]
    said = [token for one in turn["rounds"] for token in one if token["kind"] != "rejected"]
    assert [token["token"] for token in said] == turn["tokens"]
    assert all(name in result.output for name in COLUMNS)  # the first round drafts nothing
    assert len(turn["trees"]) == result.output.count("accepted; root")
    assert bool(turn["trees"]) is ("--tree" in options)
    assert result.output.count("mask, 0 is the root") == ("--tree" in options)
