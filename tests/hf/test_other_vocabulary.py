"""A draft model of another vocabulary: text that is carried over, and what it drafts."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from specdec_hf import StatelessDrafter, TrieTree, generate
from specdec_hf.drafters.fingerprint import UNKNOWN, fingerprint_of, same_vocabulary
from specdec_host import Corpus
from specdec_papers import OtherVocabularyDrafter
from specdec_papers.ngram_table import NgramTable
from specdec_papers.other_vocabulary import Translation, Vocabulary, plain_end
from support import cli_models, hf_models
from support.cli_models import END, answered, letters, one_line_error, succeed, write_folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.papers

LINES = [
    "The cat sat on the mat, and the cat sat on the hat. ",
    "Überall grünt es; die Mäuse schlafen. ",
    "日本語のテキスト、日本語の文字。 ",
    "The mat is on the cat \N{GRINNING FACE}\N{CAT FACE}. ",
]


@cache
def merges(size):
    """Byte-level BPE with ``size`` tokens, learnt from the lines; "<s>" and "</s>" are special."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator(LINES * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


@cache
def characters():
    """One token for each character of the lines; "<s>" and "<end>" are special."""
    known = ["<s>", "<end>", "?", *sorted(set("".join(LINES)))]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(known)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="<end>", unk_token="?"
    )


@cache
def words():
    """BPE over characters whose tokens begin with the space before a word, as in Llama 2.

    The space at the beginning of a text is dropped.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<s>", "</s>"], show_progress=False
    )
    core.train_from_iterator(LINES * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {
    "bytes": lambda: merges(258),
    "merges": lambda: merges(330),
    "more merges": lambda: merges(400),
    "characters": characters,
    "words": words,
}
PAIRS = [(a, b) for a in TOKENIZERS for b in TOKENIZERS if a != b]


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("source", "goal"), PAIRS)
def test_text_is_carried_over_piece_by_piece(source, goal):
    source, goal = (Vocabulary(TOKENIZERS[name](), 10) for name in (source, goal))
    text = "".join(LINES)
    ids = encode(source.tokenizer, text)
    generator = torch.Generator().manual_seed(0)
    carried, end, waits = Translation(source, goal), 0, 0
    while end < len(ids):
        end = min(len(ids), end + int(torch.randint(1, 6, (), generator=generator)))
        carried.extend(ids[:end])
        waits += carried.unfinished
        so_far = source.text_of(ids[:end])
        if carried.unfinished:
            assert so_far.endswith("\N{REPLACEMENT CHARACTER}")
            assert text.startswith(goal.text_of(carried.ids))
        else:
            assert goal.text_of(carried.ids) == so_far
    assert goal.text_of(carried.ids) == text
    # Tokens that grow with the text are replaced, so they are those of the whole text.
    assert carried.ids == encode(goal.tokenizer, text)
    assert waits > 0 or source.tokenizer is not merges(258)


def test_special_tokens_are_translated_or_left_out():
    source, goal = Vocabulary(merges(330), 10), Vocabulary(characters(), 10)
    begin, end = source.special["<s>"], source.special["</s>"]
    carried = Translation(source, goal)
    words = encode(source.tokenizer, "The cat")
    more = encode(source.tokenizer, "sat")
    carried.extend([begin, *words, end])
    carried.extend([begin, *words, end, *more, begin])
    expected = [*encode(goal.tokenizer, "The catsat"), goal.special["<s>"]]
    assert carried.ids == [goal.special["<s>"], *expected]
    assert plain_end(carried.ids, goal) == []
    back = Translation(goal, source)
    back.extend([*encode(goal.tokenizer, "The cat"), goal.special["<end>"]])
    assert back.ids == words


def test_a_text_begins_once_as_texts_of_the_draft_model_do():
    core = Tokenizer.from_str(merges(330).backend_tokenizer.to_str())
    begin = [("<s>", merges(330).bos_token_id)]
    core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=begin)
    goal = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokens = encode(merges(258), "The cat")
    for begin in ([], encode(merges(258), "<s>")):
        carried = Translation(Vocabulary(merges(258), 10), Vocabulary(goal, 10))
        carried.extend(begin + tokens)
        assert carried.ids == goal("The cat")["input_ids"]


def draft_text(source, goal, text, drafted):
    """The target's tokens for text or tokens of the draft model after ``text``."""
    drafter = OtherVocabularyDrafter(hf_models.tiny("llama"), goal, source)
    ids = encode(goal, drafted) if isinstance(drafted, str) else drafted
    return drafter.carry_back(encode(source, text), encode(goal, text), ids)


def test_drafts_continue_the_last_token_and_end_with_a_character():
    source, goal = merges(400), merges(258)
    assert draft_text(source, goal, "The cat sat on", " the mat") == encode(source, " the mat")
    # "cat" is one token, of which the text has the first letters.
    assert source.decode(draft_text(source, goal, "The c", "at sat")) == "at sat"
    assert source.decode(draft_text(source, goal, "The", encode(goal, " 日")[:-1])) == " "
    ended = [*encode(goal, " cat"), goal.eos_token_id, *encode(goal, "x")]
    found = draft_text(characters(), goal, "The", ended)
    assert found == [*encode(characters(), " cat"), characters().eos_token_id]


@cache
def pair(source, goal):
    return (
        hf_models.build("llama", vocab_size=len(TOKENIZERS[source]())),
        hf_models.build("gpt2", vocab_size=len(TOKENIZERS[goal]())),
    )


class Compared(StatelessDrafter):
    """A text drafter that must draft in each round what a new one drafts."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def begin(self, call):
        self.call = call
        self.kept = self.started()
        return self

    def started(self):
        return OtherVocabularyDrafter(*self.arguments).begin(self.call)

    def propose(self, history, limits):
        draft, other = (one.propose(history, limits) for one in (self.kept, self.started()))
        for b, length in enumerate(history.lengths):
            ids, others = (
                [] if one is None else one.tokens[b, : one.counts[b]].tolist()
                for one in (draft, other)
            )
            assert ids == others
            text = self.arguments[2].decode(history.tokens[b, :length])
            assert not (ids and text.endswith("\N{REPLACEMENT CHARACTER}")), "within a character"
        return draft


def test_what_a_cache_has_read_does_not_change_the_drafts():
    """Drafts are rejected, and new text makes a tokenizer split older text in another way."""
    model, small = pair("characters", "more merges")
    goal, tokenizer = TOKENIZERS["more merges"](), characters()
    texts = torch.tensor([encode(tokenizer, "".join(x))[:28] for x in (LINES, LINES[1:])])

    def dictated(input_ids, scores):  # the texts begin with different tokens
        (text,) = texts[texts[:, 0] == input_ids[0, 0]]
        likely = torch.arange(scores.shape[1]) == text[input_ids.shape[1]]
        return torch.where(likely, 50.0, -50.0).expand_as(scores)

    out = generate(
        model, texts[:, :5], drafter=Compared(small, goal, tokenizer), guard=False,
        max_new_tokens=16, do_sample=False, logits_processor=[dictated],
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out.sequences, texts[:, :21])
    assert out.stats.drafted > 15


def test_the_target_itself_is_accepted():
    """Its text is carried over and back, and its own next tokens come back."""
    tokenizer, read = letters("abcde"), []
    model, small = (hf_models.build("llama", vocab_size=5) for _ in range(2))
    small.register_forward_pre_hook(
        lambda _, args, inputs: read.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4]])}
    settings = {"max_new_tokens": 24, "do_sample": False}
    out = generate(
        model, **inputs, **settings, drafter=OtherVocabularyDrafter(small, tokenizer, tokenizer),
        guard=False, return_dict_in_generate=True, self_check=False,
    )  # fmt: skip
    assert torch.equal(out.sequences, model.generate(**inputs, **settings))
    assert out.stats.draft_acceptance_rate == 1
    assert out.stats.mean_acceptance_length > 4.5
    assert sum(read) <= 28, "tokens that were accepted are read again"


def test_a_draft_model_may_be_given_with_two_tokenizers():
    model, small = pair("merges", "characters")
    tokenizers = {"tokenizer": merges(330), "assistant_tokenizer": characters()}
    inputs, settings = hf_models.prompts((9,)), {"max_new_tokens": 12, "do_sample": False}
    out = generate(
        model, **inputs, **settings, **tokenizers, drafter=small, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, model.generate(**inputs, **settings))
    assert out.stats.drafter == "text"
    with pytest.raises(TypeError, match="tokenizer must be a tokenizer of Transformers, got None"):
        generate(model, **inputs, drafter=small, assistant_tokenizer=characters())
    with pytest.raises(ValueError, match="give tokenizer=, the model's, and assistant_tokenizer=,"):
        generate(model, **inputs, drafter=small)


def other_tokenizer():
    """That of `cli_models`, with the ids of all tokens but the special one in reverse."""
    content = json.loads(cli_models.tokenizer().backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {token: END - 1 - i for token, i in vocabulary.items()}
    core = Tokenizer.from_str(json.dumps(content))
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="</s>")
    made.chat_template = cli_models.TEMPLATE
    return made


def answer(folder, drafter, tmp_path):
    asked = ("--prompt", "one two", "--model", folder, "--drafter", drafter, "--max-new-tokens", 8)
    return answered(tmp_path, *asked)["stats"]


def test_tokenizers_are_compared_by_their_ordinary_tokens():
    ours, longer, renamed = (cli_models.tokenizer() for _ in range(3))
    longer.add_tokens(["<think>"], special_tokens=True)
    renamed.add_tokens(["more"])
    assert same_vocabulary(ours, ours)
    assert same_vocabulary(ours, longer)
    assert same_vocabulary(longer, renamed)  # both have an id that the other gives another name
    assert not same_vocabulary(ours, other_tokenizer())
    prints = [fingerprint_of(one) for one in (ours, longer, renamed, other_tokenizer())]
    assert len(set(prints)) == 4
    assert fingerprint_of(cli_models.tokenizer()) == prints[0]


@pytest.mark.parametrize(
    ("command", "drafter", "name"),
    [
        ("ngram", "ngram", "table"), ("rest", "rest", "corpus"),
        ("rest", "suffix_automaton", "corpus"),
    ],
)  # fmt: skip
def test_stored_ids_of_another_tokenizer_are_refused(folder, tmp_path, command, drafter, name):
    other = write_folder(tmp_path / "other")
    other_tokenizer().save_pretrained(other)
    (tmp_path / "text").write_text("one two one two\n" * 20)
    file = tmp_path / "stored"
    succeed("build", command, tmp_path / "text", "--output", file, "--model", other)
    asked = ("generate", "--prompt", "one two", "--model", folder, "--drafter", f"{drafter}:{file}")
    message = f"{name} must have been built with the model's tokenizer, of fingerprint"
    assert message in one_line_error(*asked)
    notes = answer(other, f"{drafter}:{file}", tmp_path)["notes"]
    assert not any("tokenizer" in note for note in notes)
    notes = answer(folder, stored(command, tmp_path / "unknown"), tmp_path)["notes"]
    assert any(f"the {name} does not record the tokenizer" in note for note in notes)


def stored(kind, path, fingerprint=UNKNOWN):
    """A drafter's name whose file holds ids of the tokenizer with this fingerprint."""
    ids = np.arange(10)
    if kind == "ngram":
        NgramTable.build([ids], END + 1, 2, fingerprint=fingerprint).save(path)
    else:
        Corpus(ids).save(path, vocab_size=END + 1, fingerprint=fingerprint)
    return f"{kind}:{path}"


@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
@pytest.mark.parametrize(("way", "kind"), [("alone", "suffix_automaton"), ("merged", "rest")])
def test_generate_checks_stored_ids_with_the_tokenizer_that_it_is_given(way, kind, entry, tmp_path):
    model, ours = hf_models.build("llama", vocab_size=END + 1), cli_models.tokenizer()
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}

    def notes(fingerprint, **given):
        drafter = stored(kind, tmp_path / "stored", fingerprint)
        merged = {"drafter": [drafter, "prompt_lookup"], "tree": TrieTree(2, 2)}
        options = {**(merged if way == "merged" else {"drafter": drafter}), **given}
        out = hf_models.through(entry, model, hf_models.prompts((5,)), options, **settings)
        return out.stats.notes

    assert not any("tokenizer" in note for note in notes(fingerprint_of(ours), tokenizer=ours))
    assert sum("was not checked" in note for note in notes(fingerprint_of(ours))) == 1
    with pytest.raises(ValueError, match="must have been built with the model's tokenizer, of fin"):
        notes(fingerprint_of(other_tokenizer()), tokenizer=ours)


def test_a_draft_model_of_as_many_other_tokens_drafts_text(folder, tmp_path):
    draft = write_folder(tmp_path / "draft")
    assert answer(folder, draft, tmp_path)["drafter"] == "model"
    other_tokenizer().save_pretrained(draft)
    assert answer(folder, draft, tmp_path)["drafter"] == "text"
    asked = ("generate", "--prompt", "a", "--model", folder, "--drafter", draft, "--tree", "2")
    assert "vocabulary of 258 tokens, got as many other tokens" in one_line_error(*asked)
