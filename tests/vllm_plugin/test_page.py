"""The program of docs/vllm.md runs as it is printed, in a process of its own."""

import os
import re
from pathlib import Path

import pytest
from specdec_vllm import DRAFTERS, RULES, vllm_interface
from specdec_vllm.settings import Settings
from support.programs import output_of
from vllm_plugin.vllm_engine import ENVIRONMENT

PAGE = Path(__file__).parents[2] / "docs/vllm.md"
MODEL = os.environ.get("SPECDEC_TEST_MODEL")
# As users run it: the engine in a process of its own.
SERVED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not here")


def test_the_page_names_every_variable_rule_and_version():
    text = PAGE.read_text()
    with pytest.raises(ValueError) as caught:
        Settings.from_environment({"SPECDEC_VLLM_OTHER": ""})
    names = re.findall(r"SPECDEC_VLLM\w*", str(caught.value))[:-1]
    assert len(names) == 5
    assert not [one for one in (*names, *RULES, *DRAFTERS) if f"`{one}`" not in text]
    assert f"**Versions: {', '.join(vllm_interface.SUPPORTED)}.**" in text


@pytest.mark.timeout(580)
@pytest.mark.skipif(not MODEL, reason="SPECDEC_TEST_MODEL names no model folder")
def test_the_printed_program_runs(tmp_path):
    pytest.importorskip("vllm", reason="`make more TASK=test-vllm` installs vLLM")
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program = tmp_path / "program.py"
    name = '"HuggingFaceTB/SmolLM2-135M-Instruct"'
    assert name in block
    program.write_text(block.replace(name, repr(MODEL)))
    said = output_of(program, timeout=540, **ENVIRONMENT | SERVED)
    assert "specdec_vllm verifies drafts; rule: as configured" in said
