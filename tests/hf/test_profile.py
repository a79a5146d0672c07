"""Profiles: their file with every fault, and what a call takes from one."""

import json

import pytest
import torch
from specdec_hf import SpeculativeDecoder, TreeSpec, TrieTree, generate, warm_up
from specdec_hf.loop.streaming import run_stream
from specdec_hf.options import Options, read_profile
from specdec_hf.profile import describe_conditions, describe_model
from support import hf_models
from transformers import GenerationConfig

NEW = 16
LOOKUP = {"drafter": "prompt_lookup", "num_assistant_tokens": 3}
MERGED = {"drafter": ["prompt_lookup", "ngram"], "tree": TrieTree(2, 3, 5)}


@pytest.fixture
def write(model, tmp_path):
    """Writes a profile of the model with some options; returns the path."""

    def save(**options):
        hf_models.profile_of(model, options or LOOKUP).save(tmp_path / "profile.json")
        return tmp_path / "profile.json"

    return save


def run(model, lengths=(9,), **kwargs):
    inputs = hf_models.prompts(lengths, vocab_size=11)
    how = {"max_new_tokens": NEW, "guard": False, "return_dict_in_generate": True, **kwargs}
    return generate(model, **inputs, **how)


def most_drafted(out):
    return max(max(record.drafted) for record in out.stats.round_log)


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": None},
        {"drafter": "auto", "num_assistant_tokens_schedule": "constant"},
        {"drafter": "ngram:2", "num_assistant_tokens": 4, "compile": False},
        {"drafter": "auto", "num_assistant_tokens_schedule": "egag", "num_assistant_tokens": 3},
        {"drafter": "ngram:no/table", "num_assistant_tokens_schedule": "egag"},
        {"drafter": "suffix_automaton:keep=1MiB", "num_assistant_tokens_schedule": "confidence"},
        {"drafter": "prompt_lookup", "num_assistant_tokens_schedule": "optimal"},
        {"drafter": ["lookahead", "ngram"], "tree": TrieTree(2, 3, 5)},
        {"drafter": "prompt_lookup", "tree": (2, 2, 1)},
        {"drafter": "prompt_lookup", "tree": TreeSpec((-1, -1, 0), (0, 2, 1))},
        MERGED,
    ],
    ids=lambda options: str(options["drafter"]),
)
def test_a_file_holds_the_options_as_a_caller_gives_them(model, write, options):
    path = write(**options)
    read = read_profile(path)
    assert read.options == options
    assert read.path == str(path)
    assert (read.model, read.conditions) == (
        describe_model(model, "tiny"), describe_conditions(model, 1, sampled=False)
    )  # fmt: skip
    taken, given = Options(profile=path), Options(**options)
    for name in ("drafter", "num_assistant_tokens", "num_assistant_tokens_schedule", "tree"):
        assert getattr(taken, name) == getattr(given, name)


def changed(**changes):
    """Replaces values by their path of keys; ... removes a key."""

    def change(content):
        for path, value in changes.items():
            *above, last = path.split("__")
            place = content
            for key in above:
                place = place[key]
            if value is ...:
                del place[last]
            else:
                place[last] = value
        return content

    return change


def rewrite(path, change):
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def schedule(value):
    return changed(options__num_assistant_tokens_schedule=value)


DRAFTER = "options: drafter must be null, a name or a list of names, got"
FAULTS = {
    "a list": (lambda content: [content], "must be a file that tune wrote, with format 'specdec"),
    "another format": (changed(format="specdec layer_skip"), "with format 'specdec profile'"),
    "a newer version": (changed(version=2), ": version must be 1, got 2"),
    "an unknown key": (changed(option={}), "measured alone, got 'option'; did you mean 'options'?"),
    "no model": (changed(model=...), "must hold model, which is missing"),
    "options of another type": (changed(options=[]), ": options must be an object, got"),
    "no drafter": (changed(options={}), ": options must hold drafter, which is missing"),
    "an unknown option": (changed(options__num_assistant_token=3), "got 'num_assistant_token'; di"),
    "a rule": (changed(options__rule="typical"), "alone, got 'rule'"),
    "a drafter of another type": (changed(options__drafter=3), f"{DRAFTER} 3"),
    "no drafters": (changed(options__drafter=[]), f"{DRAFTER} []"),
    "an empty name": (changed(options__drafter=["ngram", ""]), DRAFTER),
    "a word of the command line": (changed(options__drafter="help"), "or a name, got 'help'"),
    "plain decoding in a list": (changed(options__drafter=["ngram", "none"]), "null for plain dec"),
    "a word for a number": (changed(options__drafter="sparse_cache:budget=a"), "budget of drafter"),
    "a number out of range": (changed(options__drafter=["nasd", "ngram:0"]), "'ngram:0': order"),
    "sampling of a model": (changed(options__drafter="a/b:top_p=hot"), "drafter a/b:top_p=hot: "),
    "a schedule that needs a distribution": (schedule("egag"), "distribution or a confidence, got"),
    "a schedule for chains with a tree": (
        changed(options={"drafter": "ngram", "tree": {"TrieTree": {}},
                         "num_assistant_tokens_schedule": "egag"}), "'optimal' with trees, got 'e"
    ),
    "a schedule for chains with trees of a drafter's own": (
        changed(options={"drafter": "lookahead", "num_assistant_tokens_schedule": "heuristic"}),
        "'optimal' with trees, got 'heuristic'"
    ),
    "a number for trees of a drafter's own": (
        changed(options={"drafter": "lookahead:5,3,5", "num_assistant_tokens": 4}),
        "must be null with drafter 'lookahead:5,3,5', which says what is drafted, got 4",
    ),
    "a value that a drafter lacks": (changed(options__drafter="nasd:9"), "'nasd' takes no value"),
    "a wrong number": (changed(options__num_assistant_tokens="3"), "must be an integer in [0, 102"),
    "an unknown schedule": (schedule("optimum"), "did you mean 'optimal'?"),
    "a schedule of another type": (schedule(3), "must be a string or a Schedule, got 3"),
    "a wrong flag": (changed(options__compile="no"), "compile must be True or False, got 'no'"),
    "numbers and a tree": (changed(options__tree=[2, 1]), "must be null with tree, which says"),
    "an unknown tree": (changed(options__tree={"Bush": {}}), "tree must be null, numbers of chil"),
    "a tree without children": (changed(options__tree=[2, 0]), "tree must be an integer in [1, 10"),
    "a field that a tree lacks": (changed(options__tree={"TrieTree": {"width": 2}}), "TrieTree: "),
    "fields of another type": (changed(options__tree={"TrieTree": 2}), "must be an object, got 2"),
    "a digest of another type": (changed(model__digest=3), "digest must be null or a text, got 3"),
    "sizes of another type": (changed(model__sizes=3), "model: sizes must be an object, got 3"),
    "no sizes": (changed(model__sizes={}), "model: sizes must hold model_type, which is missing"),
    "an unknown size": (changed(model__sizes__layers=2), "sizes must hold model_type, num_hidden"),
    "a size of another type": (changed(model__sizes__vocab_size=[11]), "null, a text or an intege"),
    "a class of another type": (changed(model__class=5), "model: class must be a text, got 5"),
    "threads of another type": (changed(conditions__threads={"a": 1}), "threads must be an intege"),
    "a flag for a number": (changed(conditions__batch_size=True), "batch_size must be an integer"),
    "a number for a flag": (changed(conditions__sampled=1), "sampled must be true or false, got 1"),
    "no sequences": (changed(conditions__batch_size=0), "an integer of at least 1, got 0"),
    "a version of another type": (changed(versions__torch=3), "versions: torch must be a text, g"),
    "measured of another type": (changed(measured=[]), "measured must be an object"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_by_file_and_key(write, fault):
    change, message = FAULTS[fault]
    path = write()
    rewrite(path, change)
    for read in (read_profile, lambda path: SpeculativeDecoder(profile=path)):
        with pytest.raises(ValueError) as error:
            read(path)
        assert str(error.value).startswith(f"profile {path}")
        assert message in str(error.value)


@pytest.mark.parametrize("content", [b'{"format": ', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_is_refused_by_file(tmp_path, content):
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"profile {path} must be a JSON file that tune wrote: "):
        Options(profile=str(path))
    with pytest.raises(ValueError, match="profile must be the path of a file, got ''"):
        Options(profile="")
    with pytest.raises(OSError, match="No such file"):
        Options(profile=tmp_path / "none.json")


def test_options_that_are_given_win_over_the_profile(write):
    path = write(**LOOKUP, num_assistant_tokens_schedule="heuristic")

    def taken(**given):
        options = Options(profile=path, **given)
        return (
            options.drafter, options.num_assistant_tokens, options.tree,
            options.num_assistant_tokens_schedule,
        )  # fmt: skip

    assert taken() == ("prompt_lookup", 3, None, "heuristic")
    assert taken(num_assistant_tokens_schedule="optimal") == ("prompt_lookup", 3, None, "optimal")
    for alias in ("num_assistant_tokens", "gamma"):
        assert taken(**{alias: 5}) == ("prompt_lookup", 5, None, "heuristic")
    tree = TreeSpec.branching((2, 1))
    # The schedule is one of chains, which trees refuse.
    assert taken(tree=(2, 1)) == ("prompt_lookup", None, tree, None)
    assert taken(tree=(2, 1), num_assistant_tokens_schedule="optimal")[2:] == (tree, "optimal")
    # What was measured with one drafter is not taken for another.
    for drafter in ("auto", None, "nasd"):
        assert taken(drafter=drafter) == (drafter, None, None, None)
    path = write(**MERGED)
    assert taken(num_assistant_tokens=2) == (["prompt_lookup", "ngram"], 2, None, None)


def test_a_given_tree_drafts_without_the_schedule_of_the_profile(model, write):
    path = write(drafter="prompt_lookup", num_assistant_tokens_schedule="heuristic")
    out = run(model, profile=path, tree=(2, 1), do_sample=False)
    assert torch.equal(out.sequences, run(model, do_sample=False).sequences)
    assert out.stats.drafted > 0
    with pytest.raises(ValueError, match="'constant' or 'optimal' with trees, got 'heuristic'"):
        run(model, profile=path, tree=(2, 1), num_assistant_tokens_schedule="heuristic")


def test_a_profile_is_taken_once(write):
    """Later copies of the options keep what a call has made of them."""
    decoder = SpeculativeDecoder(profile=write())
    assert decoder.profile.taken == ("drafter", "num_assistant_tokens")
    again = decoder._with_seed(3)
    assert (again.drafter, again.num_assistant_tokens) == ("prompt_lookup", 3)
    write(drafter="nasd")
    assert decoder._with_seed(4).drafter == "prompt_lookup"


def test_every_entry_takes_a_profile(model, write):
    path = write()
    inputs = hf_models.prompts((9,), vocab_size=11)
    how = {"max_new_tokens": NEW, "return_dict_in_generate": True, "do_sample": False}
    decoder = SpeculativeDecoder(profile=path, guard=False)
    _, streamed = run_stream(decoder.stream(model, **inputs, **how), lambda step: None)
    for out in (run(model, profile=path), model.generate(**inputs, custom_generate=decoder, **how),
                streamed):  # fmt: skip
        assert (out.stats.drafter, most_drafted(out), out.stats.notes) == ("prompt_lookup", 3, [])
    assert warm_up(model, profile=path)[1].drafter == "prompt_lookup"


def test_arguments_of_transformers_that_ask_for_drafts_win(model, write):
    path = write(**LOOKUP, num_assistant_tokens_schedule="heuristic")
    out = run(model, profile=path, assistant_model=model)
    assert (out.stats.drafter, most_drafted(out)) == ("model", 5)
    out = run(model, profile=path, prompt_lookup_num_tokens=4)
    assert (out.stats.drafter, most_drafted(out)) == ("prompt_lookup", 4)
    # An error about the drafter that took the profile's place is none of the profile's.
    with pytest.raises(ValueError, match=r"needs drafter='prompt_lookup'$"):
        run(model, profile=write(drafter="nasd"), assistant_model=model, max_matching_ngram_size=2)
    config = GenerationConfig(num_assistant_tokens=2, max_new_tokens=NEW)
    out = run(model, profile=write(), generation_config=config)
    assert (out.stats.drafter, most_drafted(out)) == ("prompt_lookup", 2)


def test_a_draft_model_must_be_given_and_has_the_lengths_of_the_profile(model, write):
    path = write(drafter="some/folder", num_assistant_tokens=2)
    with pytest.raises(ValueError, match="drafts with some/folder, which must be given as drafter"):
        Options(profile=path)
    out = run(model, profile=path, drafter=model)
    assert (out.stats.drafter, most_drafted(out)) == ("model", 2)
    for drafter in ("auto", None):
        options = Options(profile=path, drafter=drafter)
        assert (options.drafter, options.num_assistant_tokens) == (drafter, None)


def test_a_profile_of_another_model_is_refused_by_name(model, write):
    path = write()
    others = {
        "whose vocab_size is 11; this model's is 13": hf_models.build("llama", vocab_size=13),
        "num_hidden_layers is 2; this model's is 3": hf_models.build("llama", 0, 11, layers=3),
        "whose weights have digest ": hf_models.build("llama", 1, vocab_size=11),
    }  # fmt: skip
    for message, other in others.items():
        with pytest.raises(ValueError, match=message) as error:
            run(other, profile=path)
        assert f"profile {path} must be that of the model, got one of tiny" in str(error.value)
        # A drafter of the call does not make it fit.
        with pytest.raises(ValueError, match=message):
            run(other, profile=path, drafter="ngram")


def test_other_conditions_are_noted(model, write):
    path = write()
    assert run(model, profile=path, do_sample=False).stats.notes == []
    (note,) = run(model, (9, 4), profile=path, do_sample=False).stats.notes
    assert note == (
        f"profile {path} was measured under other conditions, so other drafts may pay here: "
        "batch_size was 1 and is 2"
    )
    narrow = hf_models.build("llama", vocab_size=11).to(torch.bfloat16)
    torch.set_num_threads(2)
    notes = run(narrow, profile=path, do_sample=True, seed=0).stats.notes
    said = "threads was 1 and is 2; dtype was float32 and is bfloat16; sampled was false and is tru"
    assert any(said in note for note in notes)
    rewrite(path, changed(versions__torch="1.13"))
    torch.set_num_threads(1)
    (note,) = run(model, profile=path, do_sample=False).stats.notes
    assert note.endswith(f"pay here: torch was 1.13 and is {torch.__version__}")


def test_weights_that_cannot_be_compared_are_noted(model, write):
    """Rounding to float16 changes the digest, and a model may have none."""
    path = write()
    half = hf_models.build("llama", vocab_size=11).to(torch.float16)
    notes = read_profile(path).check_call(half, 1, sampled=False)
    assert notes[0] == f"whether profile {path} is that of these weights was not checked"
    rewrite(path, changed(model__digest=None))
    (note,) = run(model, profile=path, do_sample=False).stats.notes
    assert note.startswith("whether profile")


def test_weights_of_a_profile_of_float16_are_compared_in_float16(model, write):
    path = write()
    rewrite(path, changed(conditions__dtype="float16"))
    half = hf_models.build("llama", 1, vocab_size=11).to(torch.float16)
    with pytest.raises(ValueError, match="whose weights have digest"):
        read_profile(path).check_call(half, 1, sampled=False)
