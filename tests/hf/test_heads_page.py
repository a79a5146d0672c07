"""The code of docs/heads.md runs exactly as it is printed."""

import re

import pytest
from support import hf_models
from support.heads import head_folder
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.sources import ROOT

PAGE = ROOT / "docs" / "heads.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not here")


def test_the_printed_code_runs(tmp_path, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    model, inputs = hf_models.build("llama", vocab_size=7), hf_models.prompts((9, 12), vocab_size=7)
    names = {"model": model, "inputs": inputs, "folder": head_folder(model, tmp_path)}
    for block in blocks:
        exec(block, names)
    want = model.generate(**inputs, max_new_tokens=16, do_sample=False).tolist()
    assert names["text"].tolist() == names["out"].sequences.tolist() == want
    assert float(capsys.readouterr().out) > 1
