"""Ids of another tokenizer are told apart, where they are stored and where they are drafted."""

import json
import re

import numpy as np
import pytest
from specdec_hf import NgramDrafter, SpeculativeDecoder, TrieTree, generate
from specdec_hf.drafters.fingerprint import fingerprint_of, same_vocabulary
from specdec_hf.drafters.ngram_table import NgramTable
from specdec_host import Corpus
from support import cli_models, hf_models
from support.cli_models import END, folder, invoke, one_line_error, write_folder  # noqa: F401
from support.hf_models import one_thread  # noqa: F401  # autouse here
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def other_tokenizer():
    """That of `cli_models`, with the ids of all tokens but the special one in reverse."""
    content = json.loads(cli_models.tokenizer().backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {token: END - 1 - i for token, i in vocabulary.items()}
    core = Tokenizer.from_str(json.dumps(content))
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="</s>")
    made.chat_template = cli_models.TEMPLATE
    return made


def only_added(*tokens):
    """A tokenizer without ordinary tokens."""
    core = Tokenizer(models.BPE({}, []))
    core.add_tokens(list(tokens))
    return PreTrainedTokenizerFast(tokenizer_object=core)


def answer(folder, drafter, tmp_path, *more):  # noqa: F811
    """The statistics of one answer."""
    result = invoke(
        "generate", "--prompt", "one two", "--model", folder, "--drafter", drafter,
        "--max-new-tokens", 8, "--json", tmp_path / "out.json", *more,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return json.loads((tmp_path / "out.json").read_text())["prompts"][0]["turns"][0]["stats"]


def test_tokenizers_are_compared_by_their_ordinary_tokens():
    ours, longer, renamed = (cli_models.tokenizer() for _ in range(3))
    longer.add_tokens(["<think>"], special_tokens=True)
    renamed.add_tokens(["more"])
    assert same_vocabulary(ours, ours)
    assert same_vocabulary(ours, longer)
    assert same_vocabulary(longer, renamed)  # both have an id that the other gives another name
    assert not same_vocabulary(ours, other_tokenizer())
    strange, unknown = only_added("a", "b"), only_added("c", "d")
    assert same_vocabulary(strange, strange)
    assert not same_vocabulary(strange, unknown)
    prints = [fingerprint_of(one) for one in (ours, longer, renamed, other_tokenizer())]
    assert len(set(prints)) == 4
    assert fingerprint_of(cli_models.tokenizer()) == prints[0]


@pytest.mark.parametrize(
    ("command", "drafters", "name"),
    [("ngram", ["ngram"], "table"), ("rest", ["rest", "suffix_automaton"], "corpus")],
)
def test_stored_ids_of_another_tokenizer_are_refused(
    folder,  # noqa: F811
    tmp_path,
    command,
    drafters,
    name,
):
    other = write_folder(tmp_path / "other")
    other_tokenizer().save_pretrained(other)
    (tmp_path / "text").write_text("one two one two\n" * 20)
    stored = tmp_path / "stored"
    result = invoke("build", command, tmp_path / "text", "--output", stored, "--model", other)
    assert result.exit_code == 0, result.output
    ours, theirs = (
        fingerprint_of(one()).hex()[:12] for one in (cli_models.tokenizer, other_tokenizer)
    )
    for drafter in drafters:
        asked = ("generate", "--prompt", "one two", "--drafter", f"{drafter}:{stored}")
        assert (
            f"{name} must have been built with the model's tokenizer, of fingerprint {ours}, got "
            f"one that was built with {theirs}"
        ) in one_line_error(*asked, "--model", folder)
        notes = answer(other, f"{drafter}:{stored}", tmp_path)["notes"]
        assert not any("tokenizer" in note for note in notes)


def stored(kind, path, fingerprint):
    """A drafter's name whose file holds ids of the tokenizer with this fingerprint."""
    ids = np.arange(10)
    if kind == "ngram":
        NgramTable.build([ids], END + 1, 2, fingerprint=fingerprint).save(path)
    else:
        Corpus(ids).save(path, vocab_size=END + 1, fingerprint=fingerprint)
    return f"{kind}:{path}"


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("generate", "suffix_automaton"),
        ("custom_generate", "rest"),
        ("stream", "ngram"),
        ("merged", "rest"),
        ("cascade", "ngram"),
    ],
)
def test_generate_checks_stored_ids_with_the_tokenizer_that_it_is_given(kind, way, tmp_path):
    model = hf_models.build("llama", vocab_size=END + 1)
    inputs = {**hf_models.prompts((5,)), "max_new_tokens": 4, "do_sample": False}

    def call(drafter, tokenizer):
        given = {} if tokenizer is None else {"tokenizer": tokenizer}
        options = {"drafter": drafter}
        if way == "merged":
            options = {"drafter": [drafter, "prompt_lookup"], "tree": TrieTree(2, 2)}
        if way == "cascade":
            table = NgramTable.load(drafter.partition(":")[2])
            options = {"drafter": [model, NgramDrafter(table, learn=False)]}
        if way == "custom_generate":
            return model.generate(
                **inputs, custom_generate=SpeculativeDecoder(**options, **given),
                return_dict_in_generate=True,
            ).stats  # fmt: skip
        if way == "stream":
            steps = SpeculativeDecoder(**options).stream(model, **inputs, **given)
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value.stats
        return generate(model, **inputs, **options, **given, return_dict_in_generate=True).stats

    ours = cli_models.tokenizer()
    drafter = stored(kind, tmp_path / "ours", fingerprint_of(ours))
    assert not any("tokenizer" in note for note in call(drafter, ours).notes)
    assert sum("was not checked" in note for note in call(drafter, None).notes) == 1
    drafter = stored(kind, tmp_path / "other", fingerprint_of(other_tokenizer()))
    with pytest.raises(ValueError, match="must have been built with the model's tokenizer, of fin"):
        call(drafter, ours)


def test_stored_ids_of_an_unknown_tokenizer_leave_a_note(folder, tmp_path):  # noqa: F811
    ids = np.arange(10)
    NgramTable.build([ids], END + 1, 2).save(tmp_path / "ngram")
    Corpus(ids).save(tmp_path / "rest", vocab_size=END + 1)
    for drafter, name in (("ngram", "table"), ("rest", "corpus")):
        notes = answer(folder, f"{drafter}:{tmp_path / drafter}", tmp_path)["notes"]
        note = rf"drafter {drafter} .*: the {name} does not record the tokenizer"
        assert re.search(note, "\n".join(notes))


def test_a_table_keeps_its_fingerprint(tmp_path):
    table = NgramTable.build([np.array([1, 2])], 9, 2, fingerprint=b"f" * 32)
    table.save(tmp_path / "table")
    assert NgramTable.load(tmp_path / "table").fingerprint == b"f" * 32
    table.fingerprint = b"f" * 31
    table.save(tmp_path / "table")
    with pytest.raises(ValueError, match="path must name a valid n-gram table, got"):
        NgramTable.load(tmp_path / "table")
    with pytest.raises(ValueError, match="fingerprint must have 32 bytes, got 1"):
        NgramTable.build([np.array([1])], 9, 2, fingerprint=b"f")


def test_a_draft_model_of_as_many_other_tokens_drafts_text(folder, tmp_path):  # noqa: F811
    draft = write_folder(tmp_path / "draft")
    assert answer(folder, draft, tmp_path)["drafter"] == "model"
    other_tokenizer().save_pretrained(draft)
    assert answer(folder, draft, tmp_path)["drafter"] == "text"
    asked = ("generate", "--prompt", "a", "--model", folder, "--drafter", draft, "--tree", "2")
    assert "vocabulary of 258 tokens, got as many other tokens" in one_line_error(*asked)
    stored = (draft / "tokenizer.json").read_text()
    (draft / "tokenizer.json").write_text(stored[: len(stored) // 2])
    asked = ("generate", "--prompt", "a", "--model", folder, "--drafter", draft)
    assert f"--drafter: cannot load a tokenizer from {draft}" in one_line_error(*asked)
    for file in draft.glob("token*"):
        file.unlink()
    assert answer(folder, draft, tmp_path)["drafter"] == "model"
