"""What installed packages add by entry points, and what is refused of it by name."""

import sys
import textwrap

import pytest
import specdec_hf
import torch
from specdec_hf import plugins
from specdec_hf.drafting import registry
from support import hf_models
from support.cli_models import invoke

MINE = """
    from specdec_hf import Draft, StatelessDrafter
    from specdec_hf.drafting.entry import DrafterEntry

    DRAFTERS = {"NAME": DrafterEntry("mine:Mine", "drafts the last token again")}

    class Mine(StatelessDrafter):
        name = "NAME"

        def propose(self, texts, limits):
            import torch
            return Draft(torch.from_numpy(texts.last(1)))
"""
WRONG = {  # the module, its line of the group of drafters, and the error
    "name": (MINE.replace("NAME", "ngram"), "mine = mine:DRAFTERS",
             "got 'ngram' for specdec_papers.ngram:NgramDrafter and, by mine of specdec.drafter"),
    "table": ("", "specdec_papers = mine:DRAFTERS", "must differ in name, got 'specdec_papers'"),
    "object": ("", "mine = mine:ABSENT",
               "'mine' of specdec.drafters cannot be loaded from mine:ABSENT"),
    "import": ("import absent_package", "mine = mine:DRAFTERS", "No module named 'absent_package'"),
    "class": (MINE.replace("NAME", "mine").replace("mine:M", "absent:M"), "mine = mine:DRAFTERS",
              "drafter 'mine' at absent:Mine: No module named 'absent'"),
}  # fmt: skip


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a package `mine` with a module and an entry point; nothing is kept of it."""

    def install(module, point):
        folder = tmp_path / "mine-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
        (folder / "entry_points.txt").write_text(f"[specdec.drafters]\n{point}\n")
        (tmp_path / "mine.py").write_text(textwrap.dedent(module))
        forget()

    def forget():
        sys.modules.pop("mine", None)
        plugins.entry_points_of.cache_clear()
        registry._tables.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    monkeypatch.undo()
    forget()


def test_a_drafter_is_one_file_and_one_entry_point(installed):
    installed(MINE.replace("NAME", "mine"), "mine = mine:DRAFTERS")
    rounds, settings = [], {**hf_models.prompts((9,)), "max_new_tokens": 12, "guard": False}
    model = hf_models.tiny("llama")
    text = specdec_hf.generate(model, **settings, drafter="mine", trace=rounds.append)
    assert any(traced.draft_token_ids.numel() for traced in rounds)
    assert torch.equal(text, specdec_hf.generate(model, **settings, drafter=None))
    assert "drafts the last token again" in invoke("generate", "--drafter", "help").output


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_loaded_is_refused_by_name(installed, wrong):
    module, point, error = WRONG[wrong]
    installed(module, point)
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    with pytest.raises((ImportError, ValueError), match=error):
        specdec_hf.generate(model, **inputs, drafter="mine", max_new_tokens=2)
    specdec_hf.generate(model, **inputs, drafter="prompt_lookup", max_new_tokens=2)
    if wrong != "table":  # which names a package of ours
        specdec_hf.generate(model, **inputs, drafter="random", max_new_tokens=2)


def test_every_entry_point_of_the_wheel_is_there():
    for group in ("specdec.drafters", "specdec.plugins", "specdec.commands"):
        names = plugins.entry_points_of(group)
        assert names
        assert all(plugins.load(name, group) for name in names)
    with pytest.raises(ImportError, match=r"'absent' of specdec.plugins is in no installed packag"):
        plugins.load("absent")
