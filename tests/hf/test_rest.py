"""REST: drafts from a datastore, its file, the command that builds it, and the text."""

import numpy as np
import pytest
from hf.test_cli import folder, invoke, one_line_error  # noqa: F401
from hf.test_suffix_automaton_drafter import CORPUS, Context, SeveralProposals
from specdec_hf import RestDrafter, SuffixAutomatonDrafter, generate
from specdec_host import Corpus
from support import hf_models
from support.drafter_proof import VOCAB
from support.histories import chains_of, counts_of, history_of, propose


def test_the_most_frequent_continuations_of_the_longest_match_are_drafted():
    corpus = Corpus(np.array([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 5, 8, 2, 3, 7]))
    drafter = RestDrafter(corpus)
    history = history_of([6, 1, 2, 3], [6, 3])
    drafter.start(Context())
    draft = propose(drafter, history, 2)
    assert draft.tokens.tolist() == [[5, 8], [-1, -1]]
    assert counts_of(draft) == [2, 0]
    assert draft.confidence[0].tolist() == pytest.approx([2 / (3 + 2 / 3), 1 / (2 + 2 / 4)])
    drafter.start(SeveralProposals())
    chains = chains_of(propose(drafter, history, 2))
    assert chains[0] == [[5, 8], [4, 9], [5, 9]]
    drafter = RestDrafter(corpus, min_match=1, max_match=2)
    drafter.start(SeveralProposals())
    chains = chains_of(propose(drafter, history, 1))
    assert chains == [[[5], [4], [7]]] * 2
    drafter = RestDrafter(corpus, min_match=4)
    drafter.start(Context())
    assert propose(drafter, history, 2) is None


@pytest.mark.parametrize("made", [RestDrafter, SuffixAutomatonDrafter])
def test_a_datastore_for_another_vocabulary_is_refused(made, tmp_path):
    Corpus(CORPUS).save(tmp_path / "store", vocab_size=VOCAB)
    drafter = made.from_text(str(tmp_path / "store"))
    with pytest.raises(ValueError, match="corpus must have the model's vocabulary of 67 tokens, g"):
        generate(hf_models.tiny("llama"), **hf_models.prompts((5,)), drafter=drafter)


def test_a_datastore_is_built_from_files_and_drafts(folder, tmp_path):  # noqa: F811
    text, store = tmp_path / "text", tmp_path / "store"
    text.write_text("one two one two\n" * 20)
    result = invoke("build", "rest", text, "--output", store, "--model", folder)
    assert result.exit_code == 0, result.output
    assert f"tokens, {store.stat().st_size:,} bytes" in " ".join(result.output.split())
    for name in ("rest", "suffix_automaton"):
        result = invoke(
            "generate", "--prompt", "one two", "--model", folder, "--drafter", f"{name}:{store}",
            "--max-new-tokens", 8,
        )  # fmt: skip
        assert result.exit_code == 0, result.output
    # The same vocabulary size, and another tokenizer.
    mapped = Corpus.open(store)
    mapped.save(store, vocab_size=mapped.vocab_size, fingerprint=b"f" * 32)
    asked = ("generate", "--prompt", "one two", "--model", folder, "--drafter", f"rest:{store}")
    assert "corpus must have been built with the model's tokenizer" in one_line_error(*asked)
    store.write_bytes(store.read_bytes()[:-4])
    assert "must have" in one_line_error(*asked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "rest", "nowhere", "--output", "x"], "FILES: cannot read nowhere"),
        (["generate", "--prompt", "a", "--drafter", "rest"], "--drafter must be rest:FILE"),
        (["generate", "--prompt", "a", "--drafter", "rest:no"], "--drafter: cannot read no"),
    ],
)
def test_wrong_commands_are_one_line(arguments, message):
    assert message in one_line_error(*arguments)
