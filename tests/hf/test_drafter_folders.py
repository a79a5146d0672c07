"""A head or a draft model that is named by its folder, in Python and on the command line."""

from pathlib import Path

import pytest
import torch
from hf.published_heads import publish
from specdec_hf import EagleTree, ModelDrafter
from specdec_hf.drafting.parsed import with_name_of_head
from support import hf_models
from support.cli_models import END, answered, one_line_error, write_folder
from support.hf_models import MADE, eagle_folder, folder_of, head_folder


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", vocab_size=END + 1, layers=4)


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("drafter")
    hf_models.with_noise(target, 0.05).save_pretrained(path)
    return path


def counts(out):
    return out.stats.gammas, out.stats.accepted


@pytest.mark.parametrize(
    "settings", [{}, {"tree": (2, 1)}, {"tree": EagleTree(2, 3, 5)}], ids=["chain", "tree", "eagle"]
)
def test_a_folder_drafts_as_its_model_does(target, drafter, settings):
    loaded = ModelDrafter(type(target).from_pretrained(drafter).eval())
    wanted = hf_models.decode_as_generate(target, drafter=loaded, **settings)
    assert wanted.stats.accepted > 0
    for named in (str(drafter), Path(drafter)):
        out = hf_models.decode_as_generate(target, drafter=named, **settings)
        assert counts(out) == counts(wanted)


def test_a_folder_may_lead_a_cascade_and_have_parameters(target, drafter):
    out = hf_models.decode_as_generate(target, drafter=[drafter, "prompt_lookup"])
    assert out.stats.drafter == "vertical_cascade"
    sampled = {"do_sample": True, "seed": 0, "rule": "match"}
    warm = hf_models.decode(target, drafter=drafter, **sampled)
    cold = hf_models.decode(target, drafter=f"{drafter}:temperature=0,top_k=1", **sampled)
    assert torch.equal(cold.sequences, warm.sequences)
    assert counts(cold) != counts(warm)


@pytest.mark.parametrize("kind", ["dflash", "peagle", *(one for one in MADE if one != "eagle")])
def test_the_folder_of_a_head_names_its_drafter(target, tmp_path, monkeypatch, kind):
    made = folder_of if kind in MADE else publish
    path = made(kind, target, tmp_path)
    assert with_name_of_head(str(path)) == f"{kind}:{path}"
    monkeypatch.setenv("HOME", str(path.parent))
    for named in (str(path), path, f"{kind}:~/{path.name}"):
        assert hf_models.decode_as_generate(target, drafter=named).stats.drafter == kind
    for other in ("[]", "{", '{"architectures": null}'):
        (path / "config.json").write_text(other)
        assert with_name_of_head(str(path)) == str(path)


def test_a_path_that_is_no_drafter_says_what_it_lacks(target, drafter, tmp_path):
    for given, message in (
        ("/nothing", "drafter '/nothing': folder /nothing does not exist"),
        ("org/name", "org/name does not exist; a hub id is not looked up: give the folder of its"),
        (tmp_path, "holds no model: config.json is missing"),
        ("README.md", "drafter 'README.md': README.md is no GGUF file"),
        ("magic", "drafter must be None, the name of a drafter, a folder, a Drafter or a causal"),
        (eagle_folder(target, tmp_path), "it lacks 4 weights of LlamaForCausalLM, such as lm_head"),
        ([drafter, Path("nothing")], "folder nothing does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            hf_models.decode(target, drafter=given)


def test_the_command_line_names_the_head_in_a_folder(tmp_path):
    model = write_folder(tmp_path / "model", layers=4)
    target = hf_models.build("llama", vocab_size=END + 1, layers=4)
    head = head_folder(target, tmp_path)
    asked = ("--model", model, "--prompt", "Hi", "--max-new-tokens", 4, "--drafter")
    assert answered(tmp_path, *asked, head)["stats"]["drafter"] == "eagle3"
    line = one_line_error("generate", *asked, head, "--num-assistant-tokens", 3)
    assert f"must not be given with --drafter eagle3:{head}, which drafts its own" in line
    line = one_line_error("generate", *asked, eagle_folder(target, tmp_path))
    assert "it lacks" in line
