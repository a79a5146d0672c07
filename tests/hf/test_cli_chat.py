"""The command ``chat``: several turns, whose cache is kept where that is exact."""

import pytest
import torch
from specdec_hf import SpeculativeDecoder
from specdec_hf.cli import chat, interrupt
from specdec_hf.cli.chat import Conversation
from specdec_hf.cli.checks import Settings
from specdec_hf.cli.load import Loaded
from specdec_hf.cli.run import encode
from specdec_hf.cli.trace import PieceStream
from support import cli_models, hf_models
from support.cli_models import folder, invoke, one_line_error, says  # noqa: F401
from support.hf_models import one_thread  # noqa: F401  # autouse here


@pytest.fixture
def conversation():
    model = hf_models.build("llama", vocab_size=cli_models.END + 1, context=512)
    # Only ASCII letters: the answer is then encoded again as it was generated.
    with torch.no_grad():
        model.lm_head.weight[: ord("A") - 33] = 0
        model.lm_head.weight[ord("Z") - 32 :] = 0
    loaded = Loaded(model, cli_models.tokenizer(), ["prompt_lookup"], "tiny")
    settings = Settings(max_new_tokens=12, sampling={"temperature": 0.0})
    return Conversation(loaded, SpeculativeDecoder("prompt_lookup"), settings)


def streams(conversation, monkeypatch):
    """A list that grows by the cache that each answer is given."""
    given = []
    stream = conversation.decoder.stream

    def watched(*arguments, **kwargs):
        given.append(kwargs["past_key_values"])
        return stream(*arguments, **kwargs)

    monkeypatch.setattr(conversation.decoder, "stream", watched)
    return given


def test_answers_are_those_of_the_whole_conversation(conversation, monkeypatch):
    """With the cache of the last answer, and without."""
    given = streams(conversation, monkeypatch)
    model, tokenizer = conversation.loaded.model, conversation.loaded.tokenizer
    for number, text in enumerate(("Say it", "Again, please", "And now?")):
        if number == 2:
            conversation.messages[1]["content"] = "rewritten"  # as templates do
        messages = [*conversation.messages, {"role": "user", "content": text}]
        inputs = encode(tokenizer, messages, "cpu")
        expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        turn = conversation.answer(text)
        assert turn.tokens == expected[0, turn.prompt_tokens :].tolist()
        assert conversation.messages[-1]["content"] == tokenizer.decode(turn.tokens)
    assert [past is not None for past in given] == [False, True, False]


def test_chat_answers_every_line_of_standard_input(folder):  # noqa: F811
    result = invoke(
        "chat", "--model", folder, "--max-new-tokens", 4,
        input="Say :smile:\n\n  \n/help\nAgain [bold]\n/reset\nOnce more\n/exit\nnever read\n",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("> ")]
    assert lines == ["> Say :smile:", "> /help", "> Again [bold]", "> /reset", "> Once more"]
    assert result.output.count("4 tokens, ") == 3
    assert "; cut at --max-new-tokens 4" in result.output
    assert "/reset forgets the conversation" in result.output


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_stopped_answer_is_a_part_of_the_conversation(conversation, monkeypatch, error):
    """Also where a library turned the interruption into an error of its own."""
    conversation.answer("Say it")
    feed, seen, given = PieceStream.feed, [], streams(conversation, monkeypatch)

    def interrupted(pieces, step):
        seen.append(feed(pieces, step))
        if len(seen) == 3:
            monkeypatch.setattr(interrupt.State, "seen", True)
            raise error
        return seen[-1]

    monkeypatch.setattr(PieceStream, "feed", interrupted)
    monkeypatch.setattr(chat, "read_messages", lambda interactive: iter(["Go on", "And now?"]))
    assert chat._talk(conversation, interactive=True)
    assert not interrupt.State.seen
    said = [message["content"] for message in conversation.messages]
    assert said[2:5:2] == ["Go on", "And now?"]
    assert said[3] == "".join(piece for pieces in seen[:3] for piece, _ in pieces)
    assert len(said[1]) == len(said[5]) == 12
    assert [past is not None for past in given] == [True, False]  # the cache had changed
    model, tokenizer = conversation.loaded.model, conversation.loaded.tokenizer
    inputs = encode(tokenizer, conversation.messages[:-1], "cpu")
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    assert said[5] == tokenizer.decode(expected[inputs["input_ids"].shape[1] :])


def test_unknown_commands_are_refused_in_one_line(folder):  # noqa: F811
    start = ("chat", "--model", folder, "--max-new-tokens", 2)
    for text, first in (("/foo", "/foo"), ("/reset it", "/reset"), ("/", "/")):
        result = invoke(*start, input=f"Hi\n{text}\n")
        line = f"error: commands are /help, /reset, /exit, alone in a message, got {first}"
        assert line in result.output.splitlines()
        assert result.exit_code == 1  # the last message was not answered
    result = invoke(*start, input="/etc/hosts is a file\n")
    assert result.exit_code == 0, result.output
    assert "2 tokens, " in result.output


def test_chat_goes_on_after_a_message_that_is_too_long(folder):  # noqa: F811
    start = ("chat", "--model", folder, "--max-new-tokens", 2)
    result = invoke(*start, input=f"{'word ' * 90}\nHi\n")
    assert result.exit_code == 0, result.output
    assert "error: prompt of sequence 0 has" in result.output
    assert result.output.count("2 tokens, ") == 1
    result = invoke(*start, input=f"Hi\n{'word ' * 90}\n")
    assert result.exit_code == 1, result.output
