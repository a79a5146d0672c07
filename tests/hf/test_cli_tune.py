"""The command ``tune`` writes a profile that calls and the command line read."""

import json

import pytest
import torch
from specdec_hf import generate
from specdec_hf.cli.weights import load_folder
from specdec_hf.lab.tune import search
from specdec_hf.lab.tune.candidates import DRAFTERS_TRIED
from specdec_hf.options import read_profile
from specdec_hf.profile import Profile, describe_conditions, describe_model, describe_versions
from support.cli_models import folder, invoke, one_line_error, says  # noqa: F401
from support.hf_models import one_thread  # noqa: F401  # autouse here


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"turns": [f"Say {n} one two one {n}"]}) + "\n" for n in range(5))
    )
    return path


WRONG = [
    (["--minutes", "0"], "--minutes must be above 0 and finite, got 0.0"),
    (["--minutes", "nan"], "--minutes must be above 0 and finite, got nan"),
    (["--batch-size", "2"], "--batch-size must be in [1, 1] with 5 prompts, so that 5 batches"),
    (["--limit", "4"], "--prompts must hold at least 5 prompts to compare, got 4"),
    (["--limit", "0"], "--limit must be >= 1, got 0"),
    (["--output", "no/where"], "--output: folder no does not exist"),
    (["--output", "PROMPTS"], "--output would overwrite the input file"),
    (["--drafter", "promt_lookup"], "did you mean 'prompt_lookup'?"),
    (["--drafter", "suffix_automaton:keep=1MiB"], "must not keep texts of earlier calls, got suf"),
    (["--drafter", "none"], "--drafter must not be none: plain decoding is what each drafter is c"),
    (["--drafter", "prompt_lookup+"], "or names with + between them, got 'prompt_lookup+'"),
    (["--drafter", "+"], "--drafter must be a name, or names with + between them, got '+'"),
    (["--drafter", ""], "--drafter must be a name, or names with + between them, got ''"),
    (["--drafter", "ngram+none"], "--drafter none must be the only one, got ngram, none"),
    (
        ["--drafter", "suffix_automaton:keep=1MiB,keep=2MiB"],
        "keep must be given once, got 'keep=1M",
    ),
    (["--temperature", "-1"], "--temperature must be finite and >= 0, got -1"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=lambda x: " ".join(x)[:40])
def test_wrong_options_get_one_line_before_a_model_is_loaded(prompts, monkeypatch, words, message):
    monkeypatch.setattr("specdec_hf.lab.tune.command.load_models", None)
    given = [str(prompts) if word == "PROMPTS" else word for word in words]
    output = [] if "--output" in words else ["--output", prompts.with_name("out.json")]
    assert message in one_line_error("tune", "--prompts", prompts, *output, *given)


def tuned(folder, prompts, *arguments):  # noqa: F811
    output = prompts.with_name("profile.json")
    result = invoke(
        "tune", "--model", folder, "--prompts", prompts, "--output", output, "--minutes", 0.001,
        "--max-new-tokens", 6, *arguments,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return output, result


@pytest.mark.build
@pytest.mark.parametrize("pays", [True, False], ids=["the fastest", "nothing pays"])
def test_the_command_writes_what_calls_read(folder, prompts, monkeypatch, pays):  # noqa: F811
    """Whatever is chosen; which that is, a clock decides."""
    monkeypatch.setattr(
        search, "choose", lambda each, exact: search.ranked(each)[0] if pays else None
    )
    output, result = tuned(folder, prompts, "--drafter", "layers:1", "--no-compile")
    profile, (model, tokenizer) = read_profile(output), load_folder(folder)
    measured = profile.measured
    assert set(measured["stages"]) >= {"drafters", "finalists"}
    assert len(measured["stages"]["drafters"]) == len(DRAFTERS_TRIED) + 1
    assert all(one["identical"] == one["answers"] >= 5 for one in measured["stages"]["finalists"])
    assert (measured["prompts"], measured["left_out"]) == (5, {})
    assert profile.options["compile"] is False
    assert profile.model["name"] == str(folder)
    assert profile.conditions["threads"] == 1
    if pays:
        best = measured["stages"]["finalists"][0]
        assert measured["chosen"] == best
        assert says(result, f"chosen: {best['name']}, {best['ratio']:.2f} times as fast as plain")
        drafter = profile.options["drafter"]
        assert best["name"].startswith(drafter if isinstance(drafter, str) else "+".join(drafter))
    else:
        assert says(result, "chosen: plain decoding")
        assert profile.options["drafter"] is measured["chosen"] is None
    inputs = {"input_ids": tokenizer("Say one", return_tensors="pt")["input_ids"]}
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    out = generate(model, **inputs, profile=output, **how)
    assert torch.equal(out.sequences, generate(model, **inputs, drafter=None, **how).sequences)
    assert (out.stats.drafter == "none") == (not pays)
    assert not any("profile" in note for note in out.stats.notes)
    shown = invoke("generate", "--model", folder, "--prompt", "a", "--profile", output,
                   "--max-new-tokens", 4)  # fmt: skip
    assert shown.exit_code == 0, shown.output


def profile_of(path):
    """The content of a profile of the model in a folder."""
    model, _ = load_folder(path)
    profile = Profile(
        {"drafter": None}, describe_model(model, "tiny"),
        describe_conditions(model, 1, sampled=False), describe_versions(), {},
    )  # fmt: skip
    profile.save(path.parent / "written.json")
    return json.loads((path.parent / "written.json").read_text())


@pytest.mark.parametrize(
    ("options", "drafter", "tree"),
    [
        ({"drafter": "layers:1", "num_assistant_tokens": 2}, "layers", None),
        ({"drafter": "FOLDER", "tree": [2, 1]}, "model", "TreeSpec"),
        ({"drafter": ["prompt_lookup", "ngram"], "tree": {"TrieTree": {"depth": 2}}},
         "prompt_lookup, ngram", "TrieTree"),
        ({"drafter": None}, "none", None),
    ],
    ids=["name", "model", "several", "plain"],
)  # fmt: skip
def test_the_command_line_takes_a_profile(folder, prompts, options, drafter, tree):  # noqa: F811
    """Models that drafts come from are loaded, and what is given wins."""
    content = profile_of(folder)
    name = options["drafter"]
    content["options"] = {**options, "drafter": str(folder) if name == "FOLDER" else name}
    path, report = prompts.with_name("profile.json"), prompts.with_name("report.json")
    path.write_text(json.dumps(content))
    asked = ("generate", "--prompt", "one two one two one", "--model", folder, "--guard", "off",
             "--no-compare", "--max-new-tokens", 8, "--json", report)  # fmt: skip
    result = invoke(*asked, "--profile", path)
    assert result.exit_code == 0, result.output
    stats = json.loads(report.read_text())["prompts"][0]["turns"][0]["stats"]
    assert drafter in stats["drafter"]
    assert (stats["tree"] or "").startswith(tree or "")
    result = invoke(*asked, "--profile", path, "--drafter", "auto")
    assert result.exit_code == 0, result.output
    stats = json.loads(report.read_text())["prompts"][0]["turns"][0]["stats"]
    assert stats["drafter"] == "auto"


def test_a_profile_that_cannot_be_taken_gets_one_line(prompts):
    asked = ("generate", "--prompt", "a", "--profile")
    assert "--profile: cannot read nowhere: No such file" in one_line_error(*asked, "nowhere")
    assert "must be a JSON file that tune wrote" in one_line_error(*asked, prompts)
    assert "error: --profile must name a file, got ''" in one_line_error(*asked, "")
    assert "--profile: cannot read .: Is a directory" in one_line_error(*asked, ".")
