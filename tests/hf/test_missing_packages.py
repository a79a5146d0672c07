"""Without packages of the extra `hf`: one line that names them, and the command to install them.

In a process of its own, outside of the repository: here those packages are loaded already.
"""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from specdec_hf import requirements
from support.cli_models import environment, one_line_error

(STATED,) = re.findall(
    r"^hf = \[(.*)\]$", (Path(__file__).parents[2] / "pyproject.toml").read_text(), re.M
)
EXTRA = re.findall(r'"(.*?)"', STATED)  # the one list of what `hf` requires
NAMES = [re.split(r"\W", requirement)[0] for requirement in EXTRA]
LINE = "specdec_hf needs packages of specdec-kernels[hf] that are not installed: pip install "
COMMAND = "import runpy; runpy.run_module('specdec_hf', run_name='__main__', alter_sys=True)"


def run(cwd, program, *arguments):
    """A program without the packages of the extra, and metadata as that of an installed wheel."""
    info = cwd / "specdec_kernels-0.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.4", "Name: specdec-kernels", "Version: 0"]
    lines += ["Requires-Dist: torch>=2.10", 'Requires-Dist: no-such-package>=3; extra == "plot"']
    lines += [f'Requires-Dist: {requirement}; extra == "hf"' for requirement in EXTRA]
    (info / "METADATA").write_text("\n".join(lines) + "\n\n")
    hide = f"import sys; sys.modules.update(dict.fromkeys({NAMES}))\n"
    return subprocess.run(
        [sys.executable, "-c", hide + program, *arguments], cwd=cwd, capture_output=True,
        text=True, timeout=60, check=False, env=environment(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("program", "start"),
    [(COMMAND, "error: "), ("import specdec_hf\nfrom specdec_hf import Draft", "ImportError: ")],
    ids=["command", "library"],
)
def test_what_needs_the_extra_ends_with_a_line_of_what_to_install(tmp_path, program, start):
    done = run(tmp_path, program, "--help")
    assert (done.returncode, done.stdout) == (1, "")
    *traceback, line = done.stderr.splitlines()
    assert bool(traceback) is (program != COMMAND)
    assert line.startswith(start + LINE)
    assert shlex.split(line.partition("install ")[2]) == EXTRA


def test_a_package_that_reads_the_model_is_named_too(folder, tmp_path, monkeypatch):
    def read(*arguments, **options):
        raise ModuleNotFoundError("GGUF>=0.10.0 is to be installed", name="gguf")

    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    for name, reader in ((folder, "AutoConfig"), ("embedded", "AutoModelForCausalLM")):
        monkeypatch.setattr(f"transformers.{reader}.from_pretrained", read)
        line = one_line_error("generate", "--model", name, "--prompt", "a", code=1)
        assert re.search(rf"{re.escape(LINE)}('gguf>=[\d.]+'|gguf)$", line)


def test_a_version_that_is_not_supported_is_refused_by_name(monkeypatch):
    """By the first import of the loop, in a program and in a command."""
    stated = ["numpy>=1", "transformers>=4,<5; extra == 'hf'"]
    monkeypatch.setattr(requirements, "requires", lambda name: stated)
    for name in [*sys.modules]:
        if re.match(r"specdec_hf\.(api|decoder|loop|cli\.run)", name):
            monkeypatch.delitem(sys.modules, name)
    refusal = (
        f"specdec_hf does not run with transformers {transformers.__version__}: "
        "pip install 'transformers<5,>=4'"
    )
    with pytest.raises(ImportError, match=re.escape(refusal)):
        importlib.import_module("specdec_hf.api")
    assert one_line_error("generate", "--prompt", "a", code=1) == f"error: {refusal}"
