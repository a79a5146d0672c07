"""The page of drafted trees, and the command ``analyze --tree`` that draws them."""

import itertools
import json
from html.parser import HTMLParser

import pytest
from specdec_hf.cli.explain import Explained, ExplainedTree, Node
from specdec_hf.lab.analysis import tree_pictures
from specdec_hf.lab.analysis.tree_pictures import Picture, place_nodes, render_trees
from support.cli_models import folder, invoke  # noqa: F401

NODES = [
    Node(5, "<script>", -1, "accepted", 0.5, 0.25, 1.0),
    Node(6, "\x1b" + "x" * 40, -1, "drafted", 0.125),
    Node(7, " sat", 0, "rejected", 0.25, 0.5, 0.5),
]
TREE = ExplainedTree(2, 31, " the", NODES, 0, Explained(9, " on", "recovered", 0.75, position=32))
HEADER = {"model": "tiny <1>", "tree": "2,1"}


class Reader(HTMLParser):
    """Collects tags with their attributes, and the text of the nodes of trees."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.nodes, self.text = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag not in ("meta", "br", "rect", "path"):
            self.open.append(tag)
        if tag == "g":
            self.nodes.append({"kind": attributes["class"].split()[1], "title": "", "text": ""})

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "g" in self.open:
            self.nodes[-1][self.open[-1]] += data


def read_page(*trees):
    return Reader(render_trees(HEADER, [Picture("drafty", "Say <i>hello</i>", trees)]))


def test_the_page_shows_every_node_with_its_verdict():
    read = read_page(TREE)
    assert not read.open
    assert [node["kind"] for node in read.nodes] == [
        "root", "accepted", "drafted", "rejected", "recovered"
    ]  # fmt: skip
    shown = [node["text"] for node in read.nodes]
    assert shown == [" the", "<script>", "␛xxxxxxxxxxxx…", " sat", " on"]
    titles = [node["title"] for node in read.nodes]
    assert titles[0] == "' the': the last committed token"
    assert titles[1] == (
        "'<script>': 1: drafted and accepted, P 0.5000, Q 0.2500, acceptance 1.0000"
    )
    assert titles[2].endswith(": 2: drafted, not looked at, P 0.1250")
    assert titles[4] == "' on': recovered after a rejection, P 0.7500"
    assert "Say <i>hello</i>" in read.text
    assert "round 2, position 31: 3 nodes, 1 accepted" in read.text
    edges = [attributes["d"] for tag, attributes in read.tags if tag == "path"]
    assert len(edges) == 4


def test_the_mask_has_a_cell_for_each_pair_that_attends():
    read = read_page(TREE)
    after = next(i for i, (_, a) in enumerate(read.tags) if a.get("class") == "mask")
    cells = [a for tag, a in read.tags[after:] if tag == "rect"]
    size = tree_pictures.CELL
    places = {(int(a["y"]) // size, int(a["x"]) // size) for a in cells}
    assert places == {
        (0, 0), (1, 0), (1, 1), (2, 0), (2, 2), (3, 0), (3, 1), (3, 3)
    }  # fmt: skip
    assert len(cells) == len(places)


def test_the_page_of_trees_needs_nothing_beside_itself():
    text = render_trees(HEADER, [Picture("drafty", "a", [TREE]), Picture("none", "a", [])])
    read = Reader(text)
    assert not {"link", "img", "iframe", "script"} & {tag for tag, _ in read.tags}
    assert not any({"src", "href", "onload"} & set(attributes) for _, attributes in read.tags)
    assert "nothing was drafted" in text


@pytest.mark.parametrize(
    "parents", [[], [-1, 0, 1], [-1, -1, 0, 0, 1, 2], [-1] * 9, [-1, 0, 0, -1, 3, 1]], ids=str
)
def test_no_two_nodes_are_drawn_on_one_another(parents):
    places = place_nodes(parents)
    assert len(places) == len(parents) + 1
    boxes = {}
    for x, y in places:
        boxes.setdefault(x, []).append(y)
    for lines in boxes.values():
        assert all(b - a >= tree_pictures.HIGH for a, b in itertools.pairwise(sorted(lines)))
    for n, parent in enumerate(parents):
        assert places[n + 1][0] == places[parent + 1][0] + tree_pictures.COLUMN


def analyzed(folder, tmp_path, *arguments):  # noqa: F811
    """What the command prints, its report, and the page of trees."""
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"turns": ["Say: the cat sat. The cat sat"]}\n')
    result = invoke(
        "analyze", "--model", folder, "--prompts", prompts, *arguments, "--output",
        tmp_path / "pictures", "--json", report,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    page = Reader((tmp_path / "pictures" / "trees.html").read_text())
    return result.output, json.loads(report.read_text()), page


@pytest.mark.build  # a tool of the laboratory
def test_analyze_draws_the_trees_of_each_drafter(folder, tmp_path):  # noqa: F811
    printed, content, read = analyzed(
        folder, tmp_path, "--drafter", "layers:1", "--drafter", "prompt_lookup", "--gamma", 2,
        "--max-new-tokens", 8, "--tree", "2,1",
    )  # fmt: skip
    assert printed.count("Trees of the first rounds, ") == 2
    assert printed.count("mask, 0 is the root") >= tree_pictures.SHOWN_ROUNDS
    assert [tag for tag, _ in read.tags].count("h2") == 2
    assert {"root", "rejected"} <= {node["kind"] for node in read.nodes}
    assert not any(one["trees"] for one in content["measured"])
    assert content["tree"] == [2, 1]
    assert [one["drafter"] for one in content["trees"]] == ["layers:1", "prompt_lookup"]


@pytest.mark.build
def test_trees_of_a_drafter_of_its_own_are_drawn_as_they_were_measured(folder, tmp_path):  # noqa: F811
    _, content, read = analyzed(
        folder, tmp_path, "--drafter", "lookahead:2,3,2", "--max-new-tokens", 24, "--temperature", 0
    )
    (measured,), (drawn,) = content["measured"], content["trees"]
    assert drawn["drafter"] == measured["drafter"] == "lookahead:2,3,2"
    (calls,) = measured["calls"].values()
    nodes = [node for tree in drawn["trees"] for node in tree["nodes"]]
    assert len(nodes) == calls[0]["drafted"] > 0
    accepted = [node for node in nodes if node["kind"] == "accepted"]
    assert len(accepted) == calls[0]["accepted"]
    assert sum(node["kind"] == "accepted" for node in read.nodes) == len(accepted)
