"""The command line as a process: Ctrl-C at any moment, pipes, colours."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.cli_models import environment, folder  # noqa: F401

pytestmark = pytest.mark.build  # it starts processes

COMMAND = [sys.executable, "-m", "specdec_hf"]


def begin(*arguments, **kwargs):
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment(), **kwargs,
    )  # fmt: skip


def modules_of(process):
    """The libraries that a process has mapped so far."""
    try:
        with open(f"/proc/{process.pid}/maps", encoding="utf-8") as maps:
            return maps.read()
    except OSError:
        return ""


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="moments are read from /proc")
@pytest.mark.parametrize("moment", ["libtorch_cpu", "_ssl", "_C.so", "answer", "answers"])
def test_control_c_is_one_line_at_any_moment(folder, moment):  # noqa: F811
    """While options are read, torch is imported, a model is loaded, and answers are printed."""
    process = begin(
        "generate", "--model", folder, "--prompt", "abc abc", "--max-new-tokens", 200,
        "--no-compare", "--temperature", 1,
    )  # fmt: skip
    assert process.stdout
    if moment.startswith("answer"):
        process.stdout.readline()
        time.sleep(0.05 if moment == "answers" else 0)
    else:
        until = time.monotonic() + 60
        while moment not in modules_of(process) and time.monotonic() < until:
            time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told) in ((130, "error: interrupted\n"), (0, "")), told
    if not moment.startswith("answer"):  # it may have come to its end by then
        assert process.returncode == 130


def test_an_interruption_inside_of_exec_has_the_same_exit_code(tmp_path):
    """Python ends by the signal once exec() was interrupted, whoever caught that."""
    program = """
import os, signal
from specdec_hf.cli import interrupt
with interrupt.in_one_line():
    exec("os.kill(os.getpid(), signal.SIGINT)\\nwhile True: pass")
"""
    (tmp_path / "interrupted.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"], capture_output=True, text=True, env=environment(),
        cwd=tmp_path, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_a_reader_that_goes_away_is_no_error_message(folder):  # noqa: F811
    process = begin("generate", "--model", folder, "--prompt", "abc", "--max-new-tokens", 8)
    assert process.stdout
    process.stdout.close()
    assert process.stderr
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 1


def test_help_and_a_wrong_input_are_quick_and_load_no_torch():
    code = (
        "import sys; from specdec_hf.cli.app import main\n"
        "for words in (['--help'], ['generate', '--prompt', 'a', '--rule', 'best']):\n"
        "    sys.argv = ['x', *words]\n"
        "    try: main()\n"
        "    except SystemExit as end: print('exit', end.code)\n"
        "print(*{'torch', 'transformers', 'specdec_kernels'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "generate" in done.stdout
    assert done.stdout.splitlines()[-3:] == ["exit 0", "exit 2", ""]
    assert len(done.stderr.splitlines()) == 1, done.stderr
