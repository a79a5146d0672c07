"""The page of tokens: parsed on every machine, and pointed at in a browser where there is one."""

import re
import shutil
from html.parser import HTMLParser

import pytest
from specdec_hf.cli.decisions import number
from specdec_hf.cli.explain import Explained
from specdec_hf.lab.analysis.page import MEANINGS, Answer, details_of, render_page
from specdec_hf.lab.analysis.tables import ShownTable
from support.chromium import Chromium, find_chromium
from support.hf_models import one_thread  # noqa: F401  # autouse here

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


class Reader(HTMLParser):
    """Collects the tags, the text of each token, and its details by name."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.tokens, self.text = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag not in ("meta", "br"):
            self.open.append((tag, attributes))
        if "data-kind" in attributes:
            self.tokens.append({"attributes": attributes, "text": "", "details": {}, "says": ""})

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text += data
        within = [attributes.get("class", "") for _, attributes in self.open]
        if not any("data-kind" in attributes for _, attributes in self.open):
            return
        token = self.tokens[-1]
        if "details" not in within:
            token["text"] += data
        elif self.open[-1][0] == "dt":
            token["details"][data] = ""
        elif self.open[-1][0] == "dd":
            token["details"][list(token["details"])[-1]] += data
        else:
            token["says"] += data


def test_the_page_tells_of_every_token():
    read = Reader(page())
    assert not read.open
    assert len(read.tokens) == len(TOKENS)
    for token, shown in zip(TOKENS, read.tokens, strict=True):
        assert shown["attributes"]["data-kind"] == token.kind
        assert shown["attributes"]["tabindex"] == "0"
        assert shown["details"] == details_of(token)
        assert shown["says"] == MEANINGS[token.kind]
    shown = [token["text"] for token in read.tokens]
    assert shown[:6] == ["Hi", "<script>", " there↵", "!␛", "⇥“é”", " " + "x" * 300]
    assert shown[6] == "∅"
    details = read.tokens[1]["details"]
    assert details["drafted by"] == "small & <b>"
    assert details["P, target"] == "0.1250"
    assert details["Q, drafter"] == "0.5000"
    assert details["decision"] == "0.6250 ≥ 0.2500, rejected"
    assert details["drafts after it"] == "2, not looked at"
    assert read.tokens[0]["details"]["decision"] == "0.7500 < 1.0000, accepted"
    assert read.tokens[2]["details"]["probability under the residual"] == "0.5000"
    assert read.tokens[2]["details"]["uniform of the draw"] == "0.8750"
    assert "uniform of the draw" not in read.tokens[4]["details"]
    assert "Say <i>hello</i> & goodbye.\nTwice." in read.text
    assert "tiny <1>" in read.text


def test_the_tables_follow_the_answers():
    text = page()
    assert text.count("<table>") == 1
    assert "<h2>Table &lt;2&gt;</h2>" in text
    assert '<th scope="col">M_q</th><th scope="col">α</th>' in text
    assert "<tr><td>a &amp; b</td><td>0.50</td></tr>" in text
    assert text.index("Nothing") > text.index("★ fastest") > text.index("</ol>")
    assert '<p class="note">nothing was drafted</p>' in text


def test_the_page_needs_nothing_beside_itself():
    text = page()
    read = Reader(text)
    assert [tag for tag, _ in read.tags].count("script") == 1
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in read.tags}
    assert not any({"src", "href", "onload"} & set(attributes) for _, attributes in read.tags)
    assert not re.search(r"https?:|url\(|@import", text)
    policy = [a["content"] for _, a in read.tags if a.get("http-equiv")]
    assert policy[0].startswith("default-src 'none'")
    names = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(set(names)) == len(names) == len(TOKENS)
    described = [token["attributes"]["aria-describedby"] for token in read.tokens]
    assert described == names


def test_small_probabilities_keep_their_digits():
    assert [number(x) for x in (0.0, 1.0, 0.00123, 0.000123)] == [
        "0.0000", "1.0000", "0.0012", "1.23e-04"
    ]  # fmt: skip


# In a browser.

VISIBLE = """[...document.querySelectorAll('.rounds .details')]
  .map((box, i) => getComputedStyle(box).display === 'none' ? -1 : i).filter(i => i >= 0)"""
DETAILS = """(() => { const seen = [...document.querySelectorAll('.rounds .details')]
  .find(box => getComputedStyle(box).display !== 'none'); return seen && seen.innerText; })()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    executable = find_chromium()
    if executable is None:
        pytest.skip("there is no Chromium: `make test` installs it with apt-get where root may")
    folder = tmp_path_factory.mktemp("browser")
    (folder / "page.html").write_text(page(), encoding="utf-8")
    opened = Chromium(executable, folder / "profile")
    opened.page = folder / "page.html"
    yield opened
    opened.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def shown(browser):
    """The browser with the page opened anew."""
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=1000, height=800, deviceScaleFactor=1,
        mobile=False,
    )  # fmt: skip
    browser.point(1, 1)
    browser.open(browser.page)
    return browser


def place(shown, index):
    """The middle of a token."""
    return shown.evaluate(
        f"""(() => {{ const box = document.querySelectorAll('.rounds .token')[{index}]
        .getClientRects()[0]; return [box.x + box.width / 2, box.y + box.height / 2]; }})()"""
    )


@pytest.mark.build
def test_a_browser_loads_the_page_and_nothing_else(shown):
    assert shown.evaluate("document.title") == TITLE
    asked = [
        event["params"]["request"]["url"]
        for event in shown.events
        if event.get("method") == "Network.requestWillBeSent"
    ]
    assert asked == [shown.page.as_uri()]
    bad = ("Runtime.exceptionThrown", "Log.entryAdded")
    assert not [event for event in shown.events if event.get("method") in bad]
    assert shown.evaluate(VISIBLE) == []


@pytest.mark.build
def test_details_show_where_the_mouse_points(shown):
    for index, token in enumerate(TOKENS):
        shown.point(*place(shown, index))
        assert shown.evaluate(VISIBLE) == [index]
        text = shown.evaluate(DETAILS)
        assert text.startswith(MEANINGS[token.kind])
        for value in details_of(token).values():
            assert " ".join(value.split()) in " ".join(text.split())
    shown.point(1, 1)
    assert shown.evaluate(VISIBLE) == []


@pytest.mark.build
def test_details_show_where_the_keyboard_is(shown):
    shown.press("Tab")
    assert shown.evaluate(VISIBLE) == [0]
    shown.press("ArrowRight")
    shown.press("ArrowRight")
    assert shown.evaluate(VISIBLE) == [2]
    shown.press("ArrowLeft")
    assert shown.evaluate(VISIBLE) == [1]
    shown.press("Escape")
    assert shown.evaluate(VISIBLE) == []
    shown.press("Tab")
    assert shown.evaluate(VISIBLE) == [2]
    shown.point(*place(shown, 4))
    assert shown.evaluate(VISIBLE) == [4]


@pytest.mark.build
@pytest.mark.parametrize("width", [320, 1000])
def test_the_page_and_the_details_fit_the_window(shown, width):
    shown.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=700, deviceScaleFactor=1,
        mobile=False,
    )  # fmt: skip
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    shown.press("Tab")
    left, right, bottom = shown.evaluate(
        """(() => { const box = document.querySelector('.token:focus > .details')
        .getBoundingClientRect(); return [box.left, box.right, box.bottom]; })()"""
    )
    assert 0 <= left < right <= width
    assert bottom <= 700
