"""The command line as a process and on a terminal: pipes, Ctrl-C at any moment, pastes, lines."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest
from rich.text import Text
from specdec_hf.cli.terminal import WordWrap
from support.cli_models import environment, folder  # noqa: F401

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


class Session:
    """A Python program on a pseudo-terminal."""

    def __init__(self, program, *arguments):
        self.read = ""
        self.process, self.terminal = pty.fork()
        if not self.process:
            command = [sys.executable, "-c", program, *map(str, arguments)]
            os.execve(sys.executable, command, environment(TERM="xterm"))

    def until(self, words):
        """Read until the output holds these words, and return what came before them."""
        limit = time.monotonic() + 60
        while words not in self.read:
            assert time.monotonic() < limit, self.read
            if select.select([self.terminal], [], [], 1)[0]:
                self.read += os.read(self.terminal, 1 << 16).decode(errors="replace")
        before, _, self.read = self.read.partition(words)
        return before

    def type(self, text):
        os.write(self.terminal, text.encode(errors="surrogateescape"))

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
def test_a_paste_of_several_lines_is_one_message():
    session = Session(MESSAGES)
    session.until("\x1b[?2004h> ")  # it asks the terminal for the brackets of a paste
    session.type("\x1b[200~one\rtwo\n\nthree\x1b[201~")
    session.until("three")
    session.type("\r")
    session.until(r"message 'one\ntwo\n\nthree'")
    session.type("/exit\r")
    assert session.end()[0] == 0


@pytest.mark.build
def test_control_c_stops_an_answer_and_then_leaves(folder):  # noqa: F811
    session = Session(CHAT, "chat", "--model", folder, "--max-new-tokens", 40, "--drafter", "none")
    session.until("> ")
    session.type("/rest\r")
    session.until("no command '/rest'; did you mean '/reset'? /help lists all\r\n")
    session.type("Say it\r")
    session.until("\x1b[?2004l\r")  # where readline has read the line
    while not session.read:
        session.read += os.read(session.terminal, 1 << 16).decode()
    session.type("\x03")
    assert "cut at" not in session.until("the answer was stopped; Ctrl-C again leaves")
    session.until("> ")
    session.type("x" * 1200 + "\r")
    session.until("error: prompt of sequence 0 has")
    session.until("> ")
    session.type("Again\r")
    session.until("--max-new-tokens 40")
    session.until("> ")
    code, left = session.end(interrupt=True)
    assert code == 130
    assert left.endswith("error: interrupted\r\n")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("the cat sat on the mat", ["the cat", "sat on the", "mat"]),
        ("a 0123456789abcd e fg h", ["a", "0123456789abcd e fg", "h"]),
        ("if x:\n    return  y", ["if x:", "    return", "y"]),
        ("日本語の文章です", ["日本語の文", "章です"]),
    ],
    ids=["words", "long", "code", "wide"],
)
def test_lines_of_a_stream_end_between_words(text, lines):
    """The terminal breaks a word that is longer than a line."""
    for size in (1, 7):
        wrap, pieces = WordWrap(10), (Text(text[i : i + size]) for i in range(0, len(text), size))
        wrapped = "".join(wrap.feed(piece).plain for piece in pieces) + wrap.rest().plain
        assert wrapped.split("\n") == lines


# Without a terminal.


def begin(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "specdec_hf", *map(str, arguments)], env=environment(), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def modules_of(process):
    """The libraries that a process has mapped so far."""
    try:
        with open(f"/proc/{process.pid}/maps", encoding="utf-8") as maps:
            return maps.read()
    except OSError:
        return ""


@pytest.mark.build
@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="moments are read from /proc")
@pytest.mark.parametrize("moment", ["libtorch_cpu", "answers"])
def test_control_c_is_one_line_at_any_moment(folder, moment):  # noqa: F811
    """While torch is imported, and while answers are printed."""
    process = begin(
        "generate", "--model", folder, "--prompt", "abc abc", "--max-new-tokens", 200,
        "--no-compare", "--temperature", 1,
    )  # fmt: skip
    assert process.stdout
    if moment == "answers":
        process.stdout.readline()
        time.sleep(0.05)
    else:
        until = time.monotonic() + 60
        while moment not in modules_of(process) and time.monotonic() < until:
            time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    if moment == "answers":  # its figures may be printed by then, and it may have ended
        ends = {130: "\nerror: interrupted\n", 0: "from the second round\n"}
        assert f"\n{told}".endswith(ends[process.returncode]), told
        assert "Traceback" not in told
    else:
        assert (process.returncode, told) == (130, "error: interrupted\n")


@pytest.mark.build
def test_a_reader_that_goes_away_is_no_error_message(folder):  # noqa: F811
    process = begin("generate", "--model", folder, "--prompt", "abc", "--max-new-tokens", 8)
    assert process.stdout
    process.stdout.close()
    assert process.stderr
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 1
