"""What calls and the command line take from a profile, and the errors where it does not fit."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from specdec_hf import generate
from specdec_hf.cli import checks
from specdec_hf.cli.weights import load_folder
from specdec_hf.lab.tune import search
from specdec_hf.lab.tune.candidates import DRAFTERS_TRIED
from specdec_hf.options import Options, read_profile
from specdec_hf.trees import TrieTree
from support import hf_models
from support.cli_models import (  # noqa: F401
    answered,
    folder,
    invoke,
    one_line_error,
    says,
    succeed,
)
from support.hf_models import (
    profile_of,
)

ASKED = ("generate", "--prompt", "one two one two one", "--no-compare", "--max-new-tokens", 6)
PLAIN = {"drafter": None}
LOOKUP = {"drafter": "prompt_lookup"}
TREE = {**LOOKUP, "tree": (2, 2)}
RECYCLED = {"drafter": "token_recycling"}
BOUND = {"drafter": "prompt_lookup", "num_assistant_tokens_schedule": "heuristic"}


@pytest.fixture(scope="module")
def model(folder):  # noqa: F811
    return load_folder(folder)[0]


@pytest.fixture
def write(model, tmp_path):
    """Writes a profile of the model with some options; returns the path."""

    def save(options):
        hf_models.profile_of(model, options).save(tmp_path / "profile.json")
        return tmp_path / "profile.json"

    return save


def run(model, **kwargs):
    inputs = {"input_ids": torch.tensor([list(b"one two one two one")])}
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, **kwargs}
    return generate(model, **inputs, **how)


# The options of a profile; what a call gives, and the same in words; parts of the errors of both.
# Where a message begins with an option of the profile, its file and "options" come first.
MISFITS = {
    "a mistyped drafter": (
        {"drafter": "promt_lookup"}, {}, (),
        "profile {} drafts with promt_lookup, which must be given as drafter",
        "profile {}: options: drafter must be a name that --drafter help lists",
    ),
    "a number for trees of their own": (
        RECYCLED, {"num_assistant_tokens": 3}, ("--num-assistant-tokens", 3),
        "num_assistant_tokens must not be given with a drafter of trees, which says what is "
        "drafted, got 3; drafter came from profile {}",
        "--num-assistant-tokens must not be given with --drafter token_recycling, which drafts its "
        "own; drafter came from profile {}",
    ),
    "a schedule for chains": (
        TREE, {"num_assistant_tokens_schedule": "egag"},
        ("--num-assistant-tokens-schedule", "egag"),
        "with trees, got 'egag'; tree came from profile {}",
        "with trees, got 'egag'; tree came from profile {}",
    ),
    "a rule for chains": (
        TREE, {"rule": "block", "do_sample": True}, ("--rule", "block", "--temperature", 1),
        "with this drafter, got 'block'; drafter came from profile {}",
        "with trees of --drafter prompt_lookup, got 'block'; tree and drafter came from profile {}",
    ),
    "a tree for plain decoding": (
        PLAIN, {"tree": (2, 2)}, ("--tree", "2,2"),
        "profile {}: options: drafter must be given with tree, got None",
        "--tree needs a drafter, but --drafter is none; drafter came from profile {}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_blamed_on_the_profile(model, folder, write, misfit):  # noqa: F811
    """Where the caller gives the same, the message says nothing of the profile."""
    options, given, words, called, told = MISFITS[misfit]
    path = write(options)
    asked = (*ASKED, "--model", folder, "--profile", path, *words)
    with pytest.raises(ValueError) as error:
        run(model, profile=path, **given)
    assert called.format(path) in str(error.value)
    assert told.format(path) in one_line_error(*asked)
    if given:
        write({"drafter": "ngram", "num_assistant_tokens": 2})
        own = ("--drafter", options["drafter"] or "none")
        own += ("--tree", "2,2") if "tree" in options else ()
        with pytest.raises(ValueError) as error:
            run(model, profile=path, **options, **given)
        for message in (str(error.value), one_line_error(*asked, *own)):
            assert "profile" not in message


def test_beams_refuse_what_a_profile_drafts_by_its_name(model, write):
    for options, message in ((TREE, "tree must be None"), (LOOKUP, "drafter must be None or a dr")):
        path = write(options)
        with pytest.raises(ValueError) as error:
            run(model, profile=path, num_beams=2)
        assert str(error.value).startswith(f"profile {path}: options: {message}")
        out = run(model, profile=path, num_beams=2, drafter="auto")
        assert torch.equal(out.sequences, run(model, num_beams=2).sequences)


@pytest.mark.parametrize("drafter", ["ngram:no/a", "suffix_automaton:no/a", "eagle3_chain:no/a"])
def test_calls_blame_files_that_drafters_read_on_the_profile(model, write, drafter):
    path = write({"drafter": drafter})
    with pytest.raises((OSError, ValueError)) as error:
        run(model, profile=path)
    assert str(error.value).startswith(f"profile {path}: options: drafter '{drafter}': ")
    if isinstance(error.value, OSError):
        assert isinstance(error.value, FileNotFoundError)
    with pytest.raises(type(error.value)) as other:
        run(model, drafter=drafter)
    assert f"profile {path}: options: {other.value}" == str(error.value)
    assert getattr(error.value, "errno", None) == getattr(other.value, "errno", None)
    run(model, profile=path, drafter="ngram")  # which reads no file


def test_files_that_drafters_read_are_blamed_on_the_profile(folder, write):  # noqa: F811
    for drafter, message in (
        ("ngram:no/table", "drafter: cannot read no/table"),
        ("eagle3_chain:no/head", "drafter eagle3_chain: folder no/head does not exist"),
        (f"peagle:{folder}", f"drafter peagle:{folder}: "),  # found when it is loaded
    ):
        path = write({"drafter": drafter})
        line = one_line_error(*ASKED, "--model", folder, "--profile", path)
        assert f"profile {path}: options: {message}" in line
        assert "profile" not in one_line_error(*ASKED, "--model", folder, "--drafter", drafter)


UNREAD = [
    ({"num_assistant_tokens": 3}, ("--num-assistant-tokens", 3)),
    ({"num_assistant_tokens_schedule": "optimal"}, ("--num-assistant-tokens-schedule", "optimal")),
    ({"guard": False}, ("--guard", "off")),
    ({"num_assistant_tokens": 3, "guard": True}, ("--num-assistant-tokens", 3, "--guard", "on")),
]


@pytest.mark.parametrize(("given", "words"), UNREAD, ids=lambda x: "-".join(map(str, x))[:30])
def test_plain_decoding_of_a_profile_notes_what_it_does_not_read(
    model, folder, write, tmp_path, given, words  # noqa: F811
):  # fmt: skip
    path = write(PLAIN)
    stats = run(model, profile=path, **given).stats
    told = answered(tmp_path, *ASKED[1:], "--model", folder, "--profile", path, *words)["stats"]
    note = f"profile {path} found no drafts that pay, so {' and '.join(given)} has no effect"
    for drafter, notes in ((stats.drafter, stats.notes), (told["drafter"], told["notes"])):
        assert drafter == "none"
        assert sum(one.startswith(note) for one in notes) == 1
    # A drafter of the call reads them, and without any of them nothing is noted.
    for quiet in (run(model, profile=path, drafter="ngram", **given), run(model, profile=path)):
        assert not any("found no drafts" in one for one in quiet.stats.notes)
    assert "needs a drafter, but --drafter is none" in one_line_error(
        *ASKED, "--model", folder, "--profile", path, "--drafter", "none", *words
    )


# What a call gives, and the same as settings.
GIVEN = {
    "nothing": ({}, {}),
    "a number": ({"num_assistant_tokens": 4}, {"num_assistant_tokens": 4}),
    "a schedule": (
        {"num_assistant_tokens_schedule": "constant"}, {"num_assistant_tokens_schedule": "constant"}
    ),
    "a tree": ({"tree": (2, 1)}, {"tree": "2,1"}),
    "auto": ({"drafter": "auto"}, {"drafter": ["auto"]}),
    "plain decoding": ({"drafter": None}, {"drafter": ["none"]}),
    "a drafter with a number": (
        {"drafter": "nasd", "num_assistant_tokens": 4},
        {"drafter": ["nasd"], "num_assistant_tokens": 4},
    ),
    "a flag": ({"compile": False}, {"compile": False}),
}  # fmt: skip
PROFILES = [PLAIN, LOOKUP, BOUND, TREE, RECYCLED, {**BOUND, "num_assistant_tokens": 2},
            {"drafter": ["prompt_lookup", "ngram"], "tree": TrieTree(2, 3, 5)},
            {"drafter": "auto", "compile": True}]  # fmt: skip


@pytest.mark.parametrize("given", GIVEN)
def test_calls_and_the_command_line_take_the_same(write, given):
    called, told = GIVEN[given]
    counts = set()
    for held in PROFILES:
        path = write(held)
        options, settings = Options(profile=path, **called), checks.Settings(profile=path, **told)
        checks._take_profile(settings)
        taken = options.profile.taken
        assert settings.profile == options.profile
        assert set(taken) == set(held) - set(called) - left_out_by(called)
        for name in taken:
            listed = getattr(options, name), getattr(settings, name)
            if name == "drafter":
                one = listed[0] if isinstance(listed[0], list) else [listed[0] or "none"]
                listed = one, listed[1]
            elif name == "tree":
                listed = held["tree"], listed[1]  # the call has made a layout of it
            assert listed[0] == listed[1]
        counts.add(len(taken))
    assert len(counts) > 1


def left_out_by(given):
    """What a profile holds and a call does not take, whatever the profile."""
    bound = {"num_assistant_tokens", "num_assistant_tokens_schedule", "tree"}
    if "drafter" in given or "tree" in given:
        return bound
    return {"num_assistant_tokens", "tree"} if "num_assistant_tokens" in given else set()


def test_the_model_of_a_profile_has_its_length_by_name_or_loaded(model, folder, write, monkeypatch):  # noqa: F811
    path = write({"drafter": str(folder), "num_assistant_tokens": 2})
    monkeypatch.chdir(folder.parent)
    for drafter, taken in ((str(folder), 2), (folder.name, 2), ("auto", None), ("ngram", None)):
        settings = checks.Settings(profile=str(path), drafter=[drafter])
        checks._take_profile(settings)
        assert (settings.drafter, settings.num_assistant_tokens) == ([drafter], taken)
    assert Options(profile=path, drafter=model).num_assistant_tokens == 2
    assert Options(profile=path, drafter="ngram").num_assistant_tokens is None


@pytest.mark.parametrize(
    ("message", "explained"),
    [
        ("tree must be None, got 3", "profile P: options: tree must be None, got 3"),
        ("--drafter: cannot read a", "profile P: options: drafter: cannot read a"),
        ("--tree needs a --drafter", "profile P: options: tree needs a --drafter"),
        ("rule must fit trees", "rule must fit trees; tree came from profile P"),
        ("street must be one", "street must be one"),
        ("--num-assistant-tokens must be 1", "--num-assistant-tokens must be 1"),
        ("tree-like", "tree-like"),
        ("cannot read a", "cannot read a; drafter came from profile P"),
        ("cannot read b/a or ab", "cannot read b/a or ab"),
    ],
)
def test_a_message_names_the_profile_where_it_names_what_came_from_it(write, message, explained):
    profile = replace(
        read_profile(write({"drafter": "rest:a"})), path="P", taken=("drafter", "tree")
    )
    assert profile.explain(message) == explained
    assert replace(profile, taken=()).explain(message) == message
    schedule = replace(profile, taken=("num_assistant_tokens_schedule", "num_assistant_tokens"))
    for name in schedule.taken:
        for option in (name, f"--{name.replace('_', '-')}"):
            assert schedule.explain(f"a, {option}") == f"a, {option}; {name} came from profile P"


# The command ``tune`` writes a profile that calls and the command line read.


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
    (["--drafter", "none"], "--drafter must not be none: each drafter is compared with no drafts"),
    (["--drafter", "prompt_lookup+"], "or names with + between them, got 'prompt_lookup+'"),
    (["--drafter", ""], "--drafter must be a name, or names with + between them, got ''"),
    (["--drafter", "ngram+none"], "--drafter none must be the only one, got ngram, none"),
    (["--temperature", "-1"], "--temperature must be finite and >= 0, got -1"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=lambda x: " ".join(x)[:40])
def test_wrong_options_get_one_line_before_a_model_is_loaded(prompts, monkeypatch, words, message):
    monkeypatch.setattr("specdec_hf.lab.tune.command.load_models", None)
    given = [str(prompts) if word == "PROMPTS" else word for word in words]
    output = [] if "--output" in words else ["--output", prompts.with_name("out.json")]
    assert message in one_line_error("tune", "--prompts", prompts, *output, *given)


@pytest.fixture
def ticks(monkeypatch):
    """The clock of the search counts how often it is read, so that no machine is too slow."""
    monkeypatch.setattr("specdec_hf.lab.tune.command.clock", itertools.count().__next__)


@pytest.mark.build
@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize("pays", [True, False], ids=["the fastest", "nothing pays"])
def test_the_command_writes_what_calls_read(folder, prompts, monkeypatch, pays):  # noqa: F811
    """Whatever is chosen; which that is, a clock decides."""
    monkeypatch.setattr(
        search, "choose", lambda each, exact: search.ranked(each)[0] if pays else None
    )
    output = prompts.with_name("profile.json")
    result = succeed(
        "tune", "--model", folder, "--prompts", prompts, "--output", output, "--minutes", 2.5,
        "--max-new-tokens", 6, "--drafter", "layers:1", "--no-compile",
    )  # fmt: skip
    profile, (model, tokenizer) = read_profile(output), load_folder(folder)
    measured = profile.measured
    assert set(measured["stages"]) >= {"drafters", "finalists"}
    assert len(measured["stages"]["drafters"]) == len(DRAFTERS_TRIED) + 1
    assert all(one["identical"] == one["answers"] >= 5 for one in measured["stages"]["finalists"])
    assert (measured["prompts"], measured["left_out"]) == (5, {})
    assert measured["ended"] == "after all stages"
    library = measured["library"]
    assert library["prompts"] >= 1
    ratio = f"without drafts this library is {library['ratio']:.2f} times as fast as model.generate"
    assert says(result, ratio)
    assert profile.options["compile"] is False
    assert profile.model["name"] == str(folder)
    assert profile.conditions["threads"] == 1
    if pays:
        best = measured["stages"]["finalists"][0]
        assert measured["chosen"] == best
        assert says(result, f"chosen: {best['name']}; model.generate ")
        drafter = profile.options["drafter"]
        assert best["name"].startswith(drafter if isinstance(drafter, str) else "+".join(drafter))
    else:
        assert says(result, "chosen: no drafts, since none are sure to be faster")
        assert profile.options["drafter"] is measured["chosen"] is None
    inputs = {"input_ids": tokenizer("Say one", return_tensors="pt")["input_ids"]}
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    out = generate(model, **inputs, profile=output, **how)
    assert torch.equal(out.sequences, generate(model, **inputs, drafter=None, **how).sequences)
    assert (out.stats.drafter == "none") == (not pays)
    assert not any("profile" in note for note in out.stats.notes)
    succeed("generate", "--model", folder, "--prompt", "a", "--profile", output,
                   "--max-new-tokens", 4)  # fmt: skip


@pytest.mark.build
@pytest.mark.parametrize("what", ["nothing", "sure", "faster", "slower"])
def test_ctrl_c_keeps_what_tune_has_found(folder, prompts, monkeypatch, what):  # noqa: F811
    """A profile is written where enough prompts were answered, and says that it ended early.

    What looks faster and is not sure to be is printed, and no profile says that drafts do not pay.
    """
    read, late, sure = itertools.count(), what != "nothing", what == "sure"
    monkeypatch.setattr(search.Trial, "speed", 0.9 if what == "slower" else 1.2)
    monkeypatch.setattr(search, "choose", lambda each, exact: each[0] if sure else None)

    def clock():
        now = next(read)
        if now == (230 if late else 60):
            raise KeyboardInterrupt
        return now

    monkeypatch.setattr("specdec_hf.lab.tune.command.clock", clock)
    output = prompts.with_name("profile.json")
    output.write_text("an earlier one")
    result = invoke(
        "tune", "--model", folder, "--prompts", prompts, "--output", output, "--minutes", 4,
        "--max-new-tokens", 4, "--no-compile",
    )  # fmt: skip
    assert result.exit_code == 130
    assert says(result, "ended early, interrupted: chance may have favoured")
    if what in ("sure", "slower"):
        profile = read_profile(output)
        assert profile.measured["ended"] == "interrupted"
        assert (profile.options["drafter"] is not None) == sure
        assert says(result, "chosen: no drafts, since none are sure to be faster") != sure
        assert says(result, "best so far, on ") is False
    else:
        assert output.read_text() == "an earlier one"
        assert says(result, "best so far, on 5 prompts: ") == late
        assert says(result, "of the 5 prompts that a profile needs: ") != late
        lacks = "are sure to be faster" if late else "have answered 5 prompts"
        assert says(result, f"wrote no profile, since no drafts {lacks}")
        assert not says(result, "chosen: ")


@pytest.mark.build
@pytest.mark.usefixtures("ticks")
def test_minutes_that_are_too_few_get_one_line(folder, prompts):  # noqa: F811
    output = prompts.with_name("profile.json")
    asked = ("tune", "--model", folder, "--prompts", prompts, "--output", output)
    result = invoke(*asked, "--minutes", 1, "--max-new-tokens", 4, "--no-compile")
    assert result.exit_code == 1
    assert says(result, "error: --minutes must be longer, got 1: no drafts have answered 5 prompts")
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "drafter", "tree"),
    [
        ({"drafter": "layers:1", "num_assistant_tokens": 2}, "layers", None),
        ({"drafter": "FOLDER", "tree": (2, 1)}, "model", "TreeSpec"),
        ({"drafter": ["prompt_lookup", "ngram"], "tree": TrieTree(depth=2)},
         "prompt_lookup, ngram", "TrieTree"),
        ({"drafter": None}, "none", None),
    ],
    ids=["name", "model", "several", "plain"],
)  # fmt: skip
def test_the_command_line_takes_a_profile(folder, prompts, options, drafter, tree):  # noqa: F811
    """Models that drafts come from are loaded, and what is given wins."""
    if options["drafter"] == "FOLDER":
        options = {**options, "drafter": str(folder)}
    path = prompts.with_name("profile.json")
    profile_of(load_folder(folder)[0], options).save(path)
    asked = (path.parent, "--prompt", "one two one two one", "--model", folder, "--guard", "off",
             "--no-compare", "--max-new-tokens", 8, "--profile", path)  # fmt: skip
    stats = answered(*asked)["stats"]
    assert drafter in stats["drafter"]
    assert (stats["tree"] or "").startswith(tree or "")
    assert answered(*asked, "--drafter", "auto")["stats"]["drafter"] == "auto"


def test_a_profile_that_cannot_be_taken_gets_one_line(prompts):
    asked = ("generate", "--prompt", "a", "--profile")
    assert "--profile: cannot read nowhere: No such file" in one_line_error(*asked, "nowhere")
    assert "must be a JSON file that tune wrote" in one_line_error(*asked, prompts)
    assert "error: --profile must name a file, got ''" in one_line_error(*asked, "")
    assert "--profile: cannot read .: Is a directory" in one_line_error(*asked, ".")
