"""The drafters of docs/drafters.md run exactly as they are printed."""

import re

import pytest
import specdec_hf
from specdec_hf import check_drafter
from specdec_hf.drafting.registry import DRAFTERS
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.sources import ROOT

PAGE = ROOT / "docs" / "drafters.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not here")


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_page_lists_each_named_drafter_with_its_exported_class(name):
    kind = DRAFTERS[name].class_name
    assert re.search(rf"^\| `{name}[:`].*\| `{kind}`", PAGE.read_text(), re.MULTILINE)
    assert getattr(specdec_hf, kind).name == name
    assert kind in specdec_hf.__all__


@pytest.mark.full
@pytest.mark.slow
def test_the_printed_drafters_run(capsys, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    kept, skipped, learning, *blocks = blocks
    assert len(blocks) == 3
    exec(skipped, {})
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 12))
    exec(kept, {"model": model, "inputs": inputs})
    questions = {"small": hf_models.perturbed("llama"), "questions": [inputs], "folder": tmp_path}
    exec(learning, {"model": model, **questions})
    greedy = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    first = {"model": model, "inputs": inputs}
    exec(blocks[0], first)
    out = first["out"]
    assert out.sequences.tolist() == greedy.tolist()
    assert out.stats.drafter == "repeats"
    assert out.stats.drafted > 0
    assert not [note for note in out.stats.notes if "drafter" in note]
    assert capsys.readouterr().out
    second = {"model": model, "inputs": inputs}
    exec(blocks[1], second)
    assert second["out"].shape == (2, 12 + 32)
    assert check_drafter(second["Unigram"](), model, rules=["block", "match"]).passed
    third = {"model": model, "inputs": inputs}
    exec(blocks[2], third)
    assert third["out"].tolist() == greedy.tolist()
    check = check_drafter(third["NextIds"](), model)
    assert check.passed
    assert not check.notes
