"""The code of docs/compat.md runs as it is printed, and the page names every function."""

import re

import pytest
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.sources import ROOT
from transformers.generation import utils

from specdec_kernels.compat import transformers

PAGE = ROOT / "docs" / "compat.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not here")


def test_the_printed_code_of_compat_runs(monkeypatch):
    monkeypatch.setattr(utils, "_speculative_sampling", utils._speculative_sampling)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    model = hf_models.tiny("llama")
    names = dict(model=model, assistant=model, inputs=hf_models.prompts((9,)))
    for block in blocks:
        exec(block, names)
    assert names["tokens"].tolist() == [[2, 0, -1]]
    assert names["accepted"].tolist() == names["emitted"].tolist() == [1]
    assert names["valid"].all()
    assert names["predicts"].tolist() == [9, -1, 4]
    assert names["accept_index"].tolist() == [[0, 2, -1]]
    assert names["out"].shape == (1, 25)
    assert utils._speculative_sampling is transformers._speculative_sampling
    assert names["sequence_lengths"].tolist() == [4]
    assert 0 < len(names["text"]) <= 16 >= len(names["best"])
    assert names["alpha"] > 0.5  # the assistant is the model itself
