"""The command ``chat`` on a terminal: pastes, Ctrl-C, and lines that end between words."""

import os
import select
import sys
import time

import pytest
from rich.text import Text
from specdec_hf.cli.terminal import WordWrap
from support.cli_models import folder  # noqa: F401

pty = pytest.importorskip("pty", reason="no pseudo-terminals here")

CHAT = """
import sys, time
from specdec_hf.cli import interrupt
with interrupt.in_one_line():
    from specdec_hf.cli import app, trace
    feed = trace.PieceStream.feed
    def slowly(self, step):
        time.sleep(0.02)  # so that an answer can be interrupted
        return feed(self, step)
    trace.PieceStream.feed = slowly
    app.main()
"""
MESSAGES = """
from specdec_hf.cli.chat import read_messages
for text in read_messages(True):
    print("message", repr(text))
"""
WITHOUT_READLINE = "import sys; sys.modules['readline'] = None"


class Session:
    """A Python program on a pseudo-terminal."""

    def __init__(self, program, *arguments, **variables):
        self.read = ""
        self.process, self.terminal = pty.fork()
        if not self.process:
            path = os.pathsep.join(sys.path)
            settings = {"TERM": "xterm", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables
            command = [sys.executable, "-c", program, *map(str, arguments)]
            os.execve(sys.executable, command, {**os.environ, **settings})

    def until(self, words):
        """Read until the output holds these words, and return what came before them."""
        limit = time.monotonic() + 60
        while words not in self.read:
            assert time.monotonic() < limit, self.read
            if select.select([self.terminal], [], [], 1)[0]:
                self.read += os.read(self.terminal, 1 << 16).decode()
        before, _, self.read = self.read.partition(words)
        return before

    def wait(self):
        """Read something, and keep it."""
        while not self.read:
            self.read += os.read(self.terminal, 1 << 16).decode()

    def type(self, text):
        os.write(self.terminal, text.encode())

    def end(self, *, interrupt=False):
        """Read to the end; returns the exit code and what was left of the output.

        Args:
            interrupt: type Ctrl-C until it ends. Python's `input` overlooks a signal that comes
                between the prompt and its wait for a key.
        """
        limit, typed = time.monotonic() + 60, 0.0
        try:
            while True:
                now = time.monotonic()
                assert now < limit, self.read
                if interrupt and now > typed + 5:
                    self.type("\x03")
                    typed = now
                if select.select([self.terminal], [], [], 0.2)[0]:
                    self.read += os.read(self.terminal, 1 << 16).decode()
        except OSError:  # as Linux says that the other side is closed
            pass
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1]), self.read


@pytest.mark.build
def test_a_paste_of_several_lines_is_one_message(tmp_path):
    """Also where the user's settings of readline are others."""
    settings = tmp_path / "inputrc"
    settings.write_text("set enable-bracketed-paste off\n")
    session = Session(MESSAGES, INPUTRC=str(settings))
    session.until("\x1b[?2004h> ")  # asks the terminal for the brackets of a paste
    session.type("\x1b[200~one\rtwo\n\nthree\x1b[201~")
    session.until("three")
    session.type("\r")
    session.until(r"message 'one\ntwo\n\nthree'")
    session.type("four\r")
    session.until("message 'four'")
    session.type("/exit\r")
    assert session.end()[0] == 0


@pytest.mark.build
def test_without_readline_lines_that_come_together_are_one_message():
    session = Session(f"{WITHOUT_READLINE}\n{MESSAGES}")
    session.until("> ")
    session.type("one\ntwo\nthree\n")
    session.until(r"message 'one\ntwo\nthree'")
    session.type("four\n")
    session.until("message 'four'")
    session.type("/exit\n")
    assert session.end()[0] == 0


@pytest.mark.build
def test_control_c_stops_an_answer_and_then_leaves(folder):  # noqa: F811
    session = Session(CHAT, "chat", "--model", folder, "--max-new-tokens", 40, "--drafter", "none")
    session.until("> ")
    session.type("/rest\r")
    session.until("got '/rest'; did you mean '/reset'?\r\n")
    session.type("Say it\r")
    session.until("\x1b[?2004l\r")  # where readline has read the line
    session.wait()
    session.type("\x03")
    assert "cut at" not in session.until("the answer was stopped; Ctrl-C again leaves")
    session.until("> ")
    session.type("x" * 1200 + "\r")
    session.until("error: prompt of sequence 0 has")
    session.until("> ")
    session.type("Again\r")
    session.until("; cut at --max-new-tokens 40")
    session.until("> ")
    code, left = session.end(interrupt=True)
    assert code == 130
    assert left.endswith("error: interrupted\r\n")


def wrapped(text, width, size):
    """The text in lines of this width, from pieces of ``size`` characters."""
    wrap = WordWrap(width)
    pieces = [Text(text[i : i + size]) for i in range(0, len(text), size)]
    return "".join(wrap.feed(piece).plain for piece in pieces) + wrap.rest().plain


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("the cat sat on the mat", ["the cat", "sat on the", "mat"]),
        ("0123456789 abc", ["0123456789", "abc"]),
        ("a 0123456789abcd e fg h", ["a", "0123456789abcd e fg", "h"]),
        ("if x:\n    return  y", ["if x:", "    return", "y"]),
        ("ends\n\nhere \n", ["ends", "", "here ", ""]),
        ("abc\tdef gh", ["abc", "def gh"]),
        ("日本語の文章です", ["日本語の文", "章です"]),
    ],
    ids=["words", "full", "long", "code", "blank", "tab", "wide"],
)
def test_lines_of_a_stream_end_between_words(text, lines, size):
    """The terminal breaks a word that is longer than a line."""
    assert wrapped(text, 10, size).split("\n") == lines
