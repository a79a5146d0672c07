"""The command ``chat``: several turns, whose cache is kept where that is exact."""

import pytest
import torch
from specdec_hf import SpeculativeDecoder
from specdec_hf.cli.chat import Conversation
from specdec_hf.cli.checks import Settings
from specdec_hf.cli.load import Loaded
from specdec_hf.cli.run import encode
from support import cli_models, hf_models
from support.cli_models import folder, invoke, one_line_error, write_folder  # noqa: F401
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


def test_answers_are_those_of_the_whole_conversation(conversation, monkeypatch):
    """With the cache of the last answer, and without."""
    given = []
    stream = conversation.decoder.stream

    def watched(*arguments, **kwargs):
        given.append(kwargs["past_key_values"])
        return stream(*arguments, **kwargs)

    monkeypatch.setattr(conversation.decoder, "stream", watched)
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
    assert "/reset forgets the conversation" in result.output


def test_chat_without_input_ends(folder):  # noqa: F811
    assert invoke("chat", "--model", folder, input="").exit_code == 0


def test_chat_goes_on_after_a_message_that_is_too_long(folder):  # noqa: F811
    start = ("chat", "--model", folder, "--max-new-tokens", 2)
    result = invoke(*start, input=f"{'word ' * 90}\nHi\n")
    assert result.exit_code == 0, result.output
    assert "error: prompt of sequence 0 has" in result.output
    assert result.output.count("2 tokens, ") == 1
    result = invoke(*start, input=f"Hi\n{'word ' * 90}\n")
    assert result.exit_code == 1, result.output


def test_chat_refuses_binary_input(folder):  # noqa: F811
    result = invoke("chat", "--model", folder, input=b"\xff\xfe\n")
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == "error: standard input is not UTF-8 text"


def test_chat_needs_a_template(tmp_path):
    line = one_line_error("chat", "--model", write_folder(tmp_path, template=None), input="a\n")
    assert "chat needs a chat template, which the tokenizer of" in line
