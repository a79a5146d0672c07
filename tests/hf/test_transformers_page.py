"""The examples of docs/transformers.md run as they are printed."""

import re

import pytest
from support import cli_models, hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.sources import ROOT
from transformers import dynamic_module_utils

PAGE = ROOT / "docs" / "transformers.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not here")


@pytest.mark.slow
def test_the_printed_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.chdir(ROOT)  # where the page's paths begin
    model = hf_models.build("llama", vocab_size=cli_models.END + 1)
    names = {
        "model": model, "tokenizer": cli_models.tokenizer(), "folder": tmp_path / "model",
    }  # fmt: skip
    texts = []
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
        texts.append(getattr(names["out"], "sequences", names["out"]))
    assert capsys.readouterr().out
    assert len(texts) == 4
    assert texts[1].equal(texts[2]), "the folder of the model has another text"
    assert texts[0].shape == texts[1].shape == (2, names["inputs"]["input_ids"].shape[1] + 32)
