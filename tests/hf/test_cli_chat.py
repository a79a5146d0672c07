"""The command ``chat``: several turns, whose cache is kept where that is exact, and commands."""

import re

import pytest
import torch
from specdec_hf import SpeculativeDecoder
from specdec_hf.cli import chat, interrupt
from specdec_hf.cli.checks import Settings, check
from specdec_hf.cli.commands import run_command
from specdec_hf.cli.conversation import Conversation
from specdec_hf.cli.load import Loaded, load
from specdec_hf.cli.run import View, encode, make_decoder
from specdec_hf.cli.trace import PieceStream
from support import cli_models, hf_models
from support.cli_models import answered, invoke, masked, says, succeed


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
    given = []
    stream = SpeculativeDecoder.stream

    def watched(*arguments, **kwargs):
        given.append(kwargs["past_key_values"])
        return stream(*arguments, **kwargs)

    monkeypatch.setattr(SpeculativeDecoder, "stream", watched)
    return given


def test_answers_are_those_of_the_whole_conversation(conversation, monkeypatch, capsys):
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
    assert said(conversation, capsys, "/cache") == "/cache: off\n"
    conversation.answer("And then?")
    assert [past is not None for past in given] == [False, True, False, False]


@pytest.mark.usefixtures("home")
def test_chat_answers_every_line_of_standard_input(tmp_path):
    """A pipe gets the answers alone, as they were generated; the rest is on standard error."""
    given = ("--model", "tiny", "--max-new-tokens", 90, "--drafter", "none")
    texts = ("Say :smile:", "Again [bold]")
    answers = [answered(tmp_path, *given, "--no-compare", "--prompt", x)["text"] for x in texts]
    assert set(answers[0]) & {chr(n) for n in range(32)}
    lines = [texts[0], "/help", "/reset", texts[1], "  ", "/clear", "/length 5", "/quit", "unread"]
    result = succeed("chat", *given, input="\n\n".join(lines))
    assert result.stdout_bytes.decode() == f"{answers[0]}\n\n{answers[1]}\n"
    asked = ["Say :smile:", "/help", "/reset", "Again [bold]", "/clear", "/length 5"]
    assert re.findall("^> (.+)$", result.stderr, re.MULTILINE) == asked
    talked = "# tokens; without drafts # tokens/s; nothing was drafted; cut at --max-new-tokens #"
    assert masked(result.stderr).count(talked) == 2
    for command in ("/speculative", "/gamma N", "/processor NAME", "/debug", "/exit"):
        assert command in result.stderr  # of the help
    more = succeed("chat", *given, "--show-drafts", input="/target\n/ngram\nSay it\n")
    for said in ("> Say it\n", "target alone\n", "drafted by nasd\n"):
        assert said in more.stdout


def test_a_stopped_answer_is_a_part_of_the_conversation(conversation, monkeypatch):
    conversation.answer("Say it")
    feed, seen, given = PieceStream.feed, [], streams(conversation, monkeypatch)

    def interrupted(pieces, step):
        seen.append(feed(pieces, step))
        if len(seen) == 3:
            monkeypatch.setattr(interrupt.InterruptState, "seen", True)
            raise RuntimeError  # a library made it of the interruption
        return seen[-1]

    monkeypatch.setattr(PieceStream, "feed", interrupted)
    monkeypatch.setattr(chat, "read_messages", lambda interactive: iter(["Go on", "And now?"]))
    assert not chat._talk(conversation, interactive=True)  # nothing failed
    assert not interrupt.InterruptState.seen
    said = [message["content"] for message in conversation.messages]
    assert said[2:5:2] == ["Go on", "And now?"]
    shown = [piece for pieces in seen[:3] for piece, kind in pieces if kind != "rejected"]
    assert said[3] == "".join(shown)
    assert len(said[1]) == len(said[5]) == 12
    assert [past is not None for past in given] == [True, False]  # the cache had changed
    model, tokenizer = conversation.loaded.model, conversation.loaded.tokenizer
    inputs = encode(tokenizer, conversation.messages[:-1], "cpu")
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    assert said[5] == tokenizer.decode(expected[inputs["input_ids"].shape[1] :])
    monkeypatch.setattr(chat, "read_messages", lambda interactive: iter(["word " * 200]))
    wrong = chat._talk(conversation, interactive=True)
    assert wrong == "the last message was not answered", "an error is no interruption"


def test_the_prompt_of_a_chat_is_no_part_of_output_that_goes_to_a_file(monkeypatch, capsys):
    lines = iter(["Hi", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": print(prompt, end="") or next(lines))
    monkeypatch.setattr(chat.select, "select", lambda *_: ([], [], []))  # nothing was pasted
    assert [*chat.read_messages(interactive=True)] == ["Hi"]
    assert capsys.readouterr() == ("", 2 * chat.PROMPT)


NO = "there is no command"
REFUSED = {
    "/": f"{NO} '/'; /help lists all",
    "/gama 3": f"{NO} '/gama'; did you mean '/gamma'? /help lists all",
    "/reset it": "/reset takes no value, got 'it'",
    "/gamma 2 3": "/gamma takes one integer, got '2 3'",
    "/gamma 0": "/gamma must be at least 1, got 0; /speculative turns drafts off",
    "/length 0": "/length must be an integer in [1, 2147483647], got 0",
    "/processor topk 1 2.5": "/processor topk takes temperature, top_k, got '1 2.5'",
    "/processor nucleus 1 2": "--top-p must be in (0, 1], got 2.0",
    "/drafter": "/drafter needs a drafter that is a language model, got --drafter auto",
}


def test_unknown_commands_are_refused_in_one_line(folder):
    """And the exit code tells of the first one although the message was answered."""
    start = ("chat", "--model", folder, "--max-new-tokens", 2)
    result = invoke(*start, input="\n".join(["Hi", *REFUSED]))
    errors = [line[7:] for line in result.output.splitlines() if line.startswith("error: ")]
    assert errors == [*REFUSED.values(), "the command / was refused"]
    assert result.exit_code == 1
    result = succeed(*start, input="/etc/hosts is a file\n")
    assert "2 tokens; " in result.output


def test_chat_goes_on_after_a_message_that_it_cannot_answer(folder):
    """That the last one was not answered decides the exit code."""
    start = ("chat", "--model", folder, "--max-new-tokens", 2)
    for wrong, error in (
        (b"word " * 90, "prompt of sequence 0 has"),
        (b"a\xffb", "the message is not valid UTF-8 at character 1"),
        ("Grüße".encode()[:3], "the message is not valid UTF-8 at character 2"),
        (b"/help \xff", ""),
    ):
        for lines, code, count in (([wrong, b"Again"], 0, 2), ([wrong], 1, 1)):
            result = invoke(*start, input=b"\n".join([b"Say it", *lines]) + b"\n")
            assert (result.exit_code, result.output.count("2 tokens; ")) == (code, count)
            assert says(result, f"error: {error}")


@pytest.fixture
def drafting(folder):
    """A conversation whose settings commands may change, with a draft model."""
    given = Settings(
        model=str(folder), drafter=["layers:1"], max_new_tokens=12, guard="off", seed=4
    )
    settings, sources = check(given)
    loaded = load(settings, sources, lambda text: None)
    decoder = make_decoder(settings, loaded.drafter, loaded.tokenizer)
    return Conversation(loaded, decoder, settings, View(), given)


def said(conversation, capsys, *texts):
    capsys.readouterr()
    for text in texts:
        assert run_command(conversation, text)
    return capsys.readouterr().out


def test_commands_change_how_the_next_answer_is_made(drafting, capsys):
    assert said(drafting, capsys, "/gamma 3", "/length 20") == "/gamma: 3\n/length: 20\n"
    greedy = drafting.answer("Say it")
    assert max(max(record.drafted) for record in greedy.stats.round_log) == 3
    assert len(greedy.tokens) == 20
    drafting.reset()
    line = "/processor: temperature 0.9, top_k 40\n"
    assert said(drafting, capsys, "/processor topk 0.9 40") == line
    sampled = drafting.answer("Say it")
    assert (sampled.seed, sampled.stats.rule) == (4, "block")
    assert sampled.tokens != greedy.tokens
    assert not run_command(drafting, "/processor minp 1 3")  # which leaves all as it was
    assert said(drafting, capsys, "/processor greedy", "/speculative") == (
        "/processor: greedy\n/speculative: off\n"
    )
    drafting.reset()
    plain = drafting.answer("Say it")
    assert (plain.tokens, plain.stats.drafted) == (greedy.tokens, 0)
