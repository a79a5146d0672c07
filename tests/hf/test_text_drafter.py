"""A draft model of another vocabulary: text that is carried over, and what it drafts."""

import json
from functools import cache

import pytest
import torch
from specdec_hf import Drafter, TextDrafter, generate
from specdec_hf.drafters.text import Translation, Vocabulary, plain_end
from support import hf_models
from support.cli_models import invoke
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.letters import letters
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LogitsProcessor, PreTrainedTokenizerFast

from bench.tiny_models.build import build

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


def test_bytes_that_are_no_character_do_not_stop_the_text():
    source, goal = Vocabulary(merges(258), 10), Vocabulary(characters(), 10)
    broken = encode(source.tokenizer, "é")[:1]
    carried = Translation(source, goal)
    carried.extend(encode(source.tokenizer, "cat") + broken * 3)
    assert carried.unfinished
    carried.extend(encode(source.tokenizer, "cat") + broken * 3 + encode(source.tokenizer, "at"))
    assert not carried.unfinished
    assert goal.text_of(carried.ids).endswith("at")
    carried = Translation(source, goal)
    carried.extend(encode(source.tokenizer, "cat") + broken * 4)
    assert not carried.unfinished
    assert goal.text_of(carried.ids) == "cat????"


def draft_text(source, goal, text, model_text):
    """The target's tokens for ``model_text`` after ``text``."""
    drafter = TextDrafter(hf_models.tiny("llama"), goal, source)
    return drafter._carry_back(encode(source, text), encode(goal, text), encode(goal, model_text))


def test_drafts_continue_the_last_token_and_end_with_a_character():
    source, goal = merges(400), merges(258)
    assert draft_text(source, goal, "The cat sat on", " the mat") == encode(source, " the mat")
    # "cat" is one token, of which the text has the first letters.
    assert source.decode(draft_text(source, goal, "The c", "at sat")) == "at sat"
    drafter = TextDrafter(hf_models.tiny("llama"), goal, source)
    part = encode(goal, " 日")[:-1]
    found = drafter._carry_back(encode(source, "The"), encode(goal, "The"), part)
    assert source.decode(found) == " "
    ended = [*encode(goal, " cat"), goal.eos_token_id, *encode(goal, "x")]
    drafter = TextDrafter(hf_models.tiny("llama"), goal, characters())
    found = drafter._carry_back(encode(characters(), "The"), encode(goal, "The"), ended)
    assert found == [*encode(characters(), " cat"), characters().eos_token_id]


def test_special_tokens_that_are_drafted_come_back_under_their_names():
    target, ours = characters(), merges(258)
    for drafted, expected in (("at<s>at", "at<s>"), ("at</s>", "at<end>"), ("</s>", "<end>")):
        assert draft_text(target, ours, "c", drafted) == encode(target, expected)
    assert draft_text(ours, target, "c", "at?") == encode(ours, "at")  # the unknown token
    drafter = TextDrafter(hf_models.tiny("llama"), ours, target)
    ended = [*encode(ours, "até")[:-1], ours.eos_token_id]
    found = drafter._carry_back(encode(target, "c"), encode(ours, "c"), ended)
    assert found == encode(target, "at")


@cache
def pair(source, goal):
    """A target and a draft model, random, for two tokenizers."""
    return (
        hf_models.build("llama", vocab_size=len(TOKENIZERS[source]())),
        hf_models.build("gpt2", vocab_size=len(TOKENIZERS[goal]())),
    )


class Compared(Drafter):
    """A text drafter that must draft in each round what a new one drafts."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def start(self, context):
        self.context = context
        self.kept = self.started()

    def started(self):
        drafter = TextDrafter(*self.arguments)
        drafter.start(self.context)
        return drafter

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


class Dictated(LogitsProcessor):
    """Makes the target write given texts [B, T], which begin with different tokens."""

    def __init__(self, texts):
        self.texts = {int(text[0]): text for text in texts}

    def __call__(self, input_ids, scores):
        token = self.texts[int(input_ids[0, 0])][input_ids.shape[1]]
        return torch.where(torch.arange(scores.shape[1]) == token, 50.0, -50.0).expand_as(scores)


@pytest.mark.parametrize(
    ("source", "goal", "state"),
    [
        pytest.param("bytes", "merges", True, id="state", marks=pytest.mark.full),
        pytest.param("characters", "more merges", False, id="keys"),
    ],
)
def test_what_a_cache_has_read_does_not_change_the_drafts(source, goal, state):
    """Drafts are rejected, and new text makes a tokenizer split older text in another way."""
    model, small = pair(source, goal)
    if state:
        small = build("Mamba2ForCausalLM", vocab_size=len(TOKENIZERS[goal]()))
    tokenizer = TOKENIZERS[source]()
    texts = torch.tensor([encode(tokenizer, "".join(x))[:28] for x in (LINES, LINES[1:])])
    out = generate(
        model, texts[:, :5], drafter=Compared(small, TOKENIZERS[goal](), tokenizer), guard=False,
        max_new_tokens=16, do_sample=False, logits_processor=[Dictated(texts)],
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out.sequences, texts[:, :21])
    assert out.stats.drafted > 15


def test_a_text_of_which_the_draft_model_knows_no_token_is_drafted_for():
    model, small = pair("merges", "characters")
    drafter = TextDrafter(small, characters(), merges(330))
    prompt = torch.tensor([[merges(330).eos_token_id] * 2])
    settings = {"max_new_tokens": 6, "do_sample": False}
    out = generate(model, prompt, drafter=drafter, guard=False, **settings)
    assert torch.equal(out, model.generate(prompt, attention_mask=prompt > 0, **settings))


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
        model, **inputs, **settings, drafter=TextDrafter(small, tokenizer, tokenizer), guard=False,
        return_dict_in_generate=True, self_check=False,
    )  # fmt: skip
    assert torch.equal(out.sequences, model.generate(**inputs, **settings))
    assert out.stats.draft_acceptance_rate == 1
    assert out.stats.mean_acceptance_length > 4.5
    assert sum(read) <= 28, "tokens that were accepted are read again"


def test_a_draft_model_of_a_short_context_drafts_within_it():
    model, tokenizer = hf_models.build("llama", vocab_size=5), letters("abcde")
    small = hf_models.build("gpt2", vocab_size=5, context=12)
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4], [3, 3, 1, 2]])}
    settings = {"max_new_tokens": 24, "do_sample": False}
    drafter = TextDrafter(small, tokenizer, tokenizer)
    out = generate(model, **inputs, **settings, drafter=drafter, guard=False)
    assert torch.equal(out, model.generate(**inputs, **settings))


@pytest.mark.slow
def test_transformers_arguments_and_the_command_line_take_two_tokenizers(tmp_path):
    model, small = pair("merges", "characters")
    tokenizers = {"tokenizer": merges(330), "assistant_tokenizer": characters()}
    inputs, settings = hf_models.prompts((9,)), {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**inputs, **settings)
    for given in ("drafter", "assistant_model"):
        out = generate(
            model, **inputs, **settings, **tokenizers, **{given: small},
            return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(out.sequences, expected)
        assert out.stats.drafter == "text"
    with pytest.raises(TypeError, match="tokenizer must be a tokenizer of Transformers, got None"):
        generate(model, **inputs, drafter=small, assistant_tokenizer=characters())
    with pytest.raises(ValueError, match="assistant_tokenizer needs a draft model as drafter or a"):
        generate(model, **inputs, drafter="prompt_lookup", **tokenizers)
    for name, held, tokenizer in (("m", model, merges(330)), ("d", small, characters())):
        held.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    result = invoke(
        "generate", "--model", tmp_path / "m", "--drafter", tmp_path / "d", "--prompt", "The cat",
        "--max-new-tokens", 6, "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    answer = json.loads((tmp_path / "out.json").read_text())["prompts"][0]["turns"][0]
    assert answer["stats"]["drafter"] == "text"
