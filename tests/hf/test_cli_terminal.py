"""The command line as a process: pipes, and Ctrl-C at two moments."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from specdec_hf.cli.terminal import close_output, prepare_streams
from support.cli_models import environment


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
def test_control_c_is_one_line_at_any_moment(folder, moment, tmp_path):
    """While torch is imported, and while answers are printed."""
    prompts = tmp_path / "prompts"
    prompts.write_text((json.dumps({"turns": ["abc abc"]}) + "\n") * 500)
    process = begin("generate", "--model", folder, "--prompts", prompts, "--no-compare")
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
    assert process.returncode == 130, told
    assert f"\n{told}".endswith("\nerror: interrupted\n"), told
    assert "Traceback" not in told
    assert moment == "answers" or told == "error: interrupted\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="it takes a file that is full")
def test_output_that_is_lost_is_told_and_lost_for_good(monkeypatch):
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        print("lost", file=full)
        assert not close_output()
        assert close_output(), "what comes later goes nowhere"


def test_a_closed_stream_takes_text_and_an_open_one_what_its_encoding_lacks(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, "ascii"))
    prepare_streams()
    with sys.stdout as closed:
        closed.write("é")
    print("é", end="", file=sys.stderr, flush=True)
    assert written.getvalue() == b"?"


@pytest.mark.build
def test_a_reader_that_goes_away_is_no_error_message(folder):
    process = begin("generate", "--model", folder, "--prompt", "abc", "--max-new-tokens", 8)
    assert process.stdout
    process.stdout.close()
    assert process.stderr
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 1
