"""`--trace`, marks and the page of tokens say of drafts and trees what plain forwards give."""

import html
import io
import re

import pytest
import torch
from rich.console import Console
from specdec_hf import SpeculativeDecoder
from specdec_hf.cli.decisions import COLUMNS, draw_mask, draw_tree
from specdec_hf.cli.explain import Explained, ExplainedTree, Explainer, Node
from specdec_hf.cli.trace import ASCII_MARKS, MARKS, PieceStream, render
from specdec_hf.lab.analysis.page import MEANINGS, Answer, details_of, render_page
from specdec_hf.lab.analysis.tables import ShownTable
from specdec_hf.loop.streaming import Step
from support import cli_models, hf_models, toy_tokenizers
from support.cli_models import folder, reported  # noqa: F401

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
    """The explainer of one answer, the ids of prompt and answer, and the rounds."""
    target, drafter = models
    tokenizer = cli_models.tokenizer()
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


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_the_decisions_of_chains_are_those_of_plain_forwards(models, rule):
    explainer, ids, _ = explained(models, rule, num_assistant_tokens=3)
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
    explainer, *_ = explained(models, "traversal", {**SAMPLING, "temperature": 0.1}, tree=(3, 2, 1))
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
    explainer, *_ = explained(models, "target_only", tree=(3, 2, 1))
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


def test_a_tree_is_drawn_with_the_verdict_of_each_node():
    console = Console(width=100, file=io.StringIO())
    console.print(draw_tree(TREE, MARKS))
    lines = console.file.getvalue().splitlines()
    first, cat, sat, on, other = (line.rstrip() for line in lines)
    assert first == "round 4, position 31: 3 nodes, 1 accepted; root  the"
    assert cat == "├── 1  «cat»  accepted, P 0.5000, Q 0.2500, accept 1.0000"
    assert sat == "│   ├── 3  ×sat×  rejected, P 5.00e-04, Q 0.5000, accept 0.0010"
    assert on == "│   └──  ‹on›  recovered, P 0.7500"
    assert other == "└── 2 ␛  not looked at, P 0.1250, Q 0.5000"


@pytest.mark.parametrize("options", [["--gamma", 3], ["--tree", "2,1"]], ids=["chain", "tree"])
def test_generate_prints_and_writes_every_decision(folder, tmp_path, options):  # noqa: F811
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


# The page of tokens.

ROUNDS = [
    [
        Explained(5, "Hi", "accepted", 0.5, "small & <b>", 0.25, 1.0, 0.75),
        Explained(6, "<script>", "rejected", 0.125, "small & <b>", 0.5, 0.25, 0.625, unread=2),
        Explained(7, " there\n", "recovered", 0.375, q=0.0625, residual=0.5, uniform=0.875),
    ],
    [
        Explained(8, "!\x1b", "accepted", 1.0, "small & <b>", 0.0000021, 1.0, 0.0),
        Explained(9, "\t“é”", "bonus", 0.25),
    ],
    [Explained(10, " " + "x" * 300, "plain", 1.0), Explained(11, "", "plain", 1.0)],
]
TITLE = "How each token came about"
TOKENS = [token for said in ROUNDS for token in said]


def page():
    answer = Answer("small: prompt 1", "Say <i>hello</i> & goodbye.\nTwice.", ROUNDS)
    tables = [
        ShownTable("Table <2>", ("M_q", "α"), [("a & b", "0.50"), ("c", "-")], "★ fastest"),
        ShownTable("Nothing", (), (), "nothing was drafted"),
    ]
    return render_page(TITLE, {"model": "tiny <1>", "temperature": "0.7"}, [answer], tables)


def test_the_page_tells_of_every_token_and_needs_nothing_beside_itself():
    text = page()
    assert text.count("data-kind=") == len(TOKENS)
    for token in TOKENS:
        assert f'data-kind="{token.kind}"' in text
        assert MEANINGS[token.kind] in text
        for name, value in details_of(token).items():
            assert html.escape(name) in text
            assert html.escape(value) in text
    assert details_of(TOKENS[1])["decision"] == "0.6250 ≥ 0.2500, rejected"
    assert details_of(TOKENS[0])["decision"] == "0.7500 < 1.0000, accepted"
    for shown in ("&lt;script&gt;", " there↵", "!␛", "Say &lt;i&gt;hello", "tiny &lt;1&gt;",
                  "<h2>Table &lt;2&gt;</h2>", "<tr><td>a &amp; b</td><td>0.50</td></tr>",
                  '<p class="note">nothing was drafted</p>'):  # fmt: skip
        assert shown in text
    assert text.count("<table>") == 1
    assert not re.search(r"https?:|url\(|@import|<(link|img|iframe|object|base)| (src|href)=", text)


# The text of an answer, with its drafts.


def test_where_there_is_no_colour_marks_tell_drafted_tokens_apart():
    tokenizer = cli_models.tokenizer()
    ids = tokenizer("a cat sat on").input_ids
    kinds = ["accepted"] * 5 + ["recovered"] * 4 + ["accepted"] + ["plain"] * 2
    steps = [Step(0, ids, kinds, [0.0] * len(ids))]
    assert render(tokenizer, steps, marks=MARKS).plain == "«a cat» ‹sat› on"
    assert render(tokenizer, steps, marks=ASCII_MARKS).plain == "[a cat] {sat} on"
    assert not render(tokenizer, steps, marks=MARKS).spans


def test_rejected_drafts_stand_before_the_token_that_replaces_them():
    """Siblings are apart, and half of a character is not shown."""
    tokenizer = cli_models.tokenizer()
    s, o, first, second, t = tokenizer("soét").input_ids
    c, d, half = tokenizer("cdé").input_ids[:3]
    steps = [
        Step(0, [s, o], ["accepted", "recovered"], [0.0] * 2, rejected=[c]),
        Step(0, [first], ["recovered"], [0.0], rejected=[c, d, half]),
        Step(0, [second], ["recovered"], [0.0], rejected=[c]),
        Step(0, [t], ["bonus"], [0.0]),
    ]
    assert render(tokenizer, steps, marks=MARKS).plain == "«s»×c×‹o›×c××d××c×‹é›t"
    coloured = render(tokenizer, steps)
    struck = {coloured.plain[a:b] for a, b, style in coloured.spans if style == "red strike"}
    assert struck == {"c", "d"}


def test_a_rejected_end_of_the_text_has_its_name():
    tokenizer = cli_models.tokenizer()
    s, first, second = tokenizer("sé").input_ids
    end = cli_models.END
    kinds = ["plain", "recovered", "bonus"]
    steps = [
        Step(0, [s], ["recovered"], [0.0], rejected=[end]),
        Step(0, [first, second, end], kinds, [0.0] * 3, rejected=[end]),
    ]
    assert render(tokenizer, steps, marks=MARKS).plain == "×</s>×‹s›×</s>×‹é›"


def test_a_stream_of_pieces_decodes_a_long_text_once():
    """Root: all tokens so far were decoded for each new one. A blank that begins stays, too."""
    tokenizer = toy_tokenizers.Counting(toy_tokenizers.sentence_piece())
    hello, newline = (tokenizer.convert_tokens_to_ids(x) for x in ("▁Hello", "<0x0A>"))
    stream, size = PieceStream(tokenizer, [hello], rejected=True), 2000
    plain = Step(0, [hello, newline], ["plain"] * 2, [0.0] * 2)
    pieces = [piece for _ in range(size // 2) for piece in stream.feed(plain)]
    assert tokenizer.decoded < 8 * size
    last = Step(0, [hello, newline], ["recovered", "bonus"], [0.0] * 2, "eos", rejected=[hello])
    assert stream.feed(last) == [(" Hello", "rejected"), (" Hello", "recovered"), ("\n", "bonus")]
    assert "".join(piece for piece, _ in pieces) + " Hello\n" == stream.text
    assert stream.text == " Hello\n" * (size // 2 + 1)
    assert stream.rest() == ("", "bonus")
