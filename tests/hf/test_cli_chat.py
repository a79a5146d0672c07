"""The command ``chat``: several turns, whose cache is kept where that is exact, and commands."""

import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from specdec_hf import SpeculativeDecoder
from specdec_hf.cli import chat, interrupt
from specdec_hf.cli.checks import Settings, check
from specdec_hf.cli.commands import COMMANDS, run_command
from specdec_hf.cli.conversation import Conversation
from specdec_hf.cli.load import Loaded, load
from specdec_hf.cli.run import View, encode, make_decoder
from specdec_hf.cli.terminal import visible
from specdec_hf.cli.trace import PieceStream
from support import cli_models, hf_models, toy_tokenizers
from support.cli_models import answered, folder, invoke, one_line_error, says, succeed  # noqa: F401


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


def test_a_spinner_says_how_much_is_read_until_the_first_token(conversation, monkeypatch, capsys):
    said = []

    @contextmanager
    def spinner(text):
        yield lambda: said.append((text, capsys.readouterr().out))

    monkeypatch.setattr("specdec_hf.cli.conversation.spinner", spinner)
    cached = 0
    for text in ("Say it", "Again, please"):
        said.clear()
        turn = conversation.answer(text)
        assert said[0] == (f"reading {turn.prompt_tokens - cached} tokens", "")
        cached = turn.prompt_tokens + len(turn.tokens) - 1
        capsys.readouterr()


def test_the_first_word_of_an_answer_keeps_its_blank(conversation, capsys):
    """What is said is what the next prompt repeats. Root: it was decoded without its prompt."""
    tokenizer = toy_tokenizers.small_pieces(cli_models.END + 1)
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with torch.no_grad():
        head = conversation.loaded.model.lm_head.weight
        head.zero_()
        for sign, piece in ((1, "▁ab"), (-1, "▁ba")):  # whatever the hidden states, one of them
            head[tokenizer.convert_tokens_to_ids(piece)] = sign
    conversation.loaded.tokenizer = tokenizer
    conversation.settings = replace(conversation.settings, max_new_tokens=2)
    turn = conversation.answer("ab")
    said = conversation.messages[-1]["content"]
    assert said[:1] == " "
    assert "ab" + said == tokenizer.decode([*turn.prompt, *turn.tokens])
    assert said == capsys.readouterr().out.rstrip("\n")


def test_chat_answers_every_line_of_standard_input(folder):  # noqa: F811
    given = ["Say :smile:", "/help", "Again [bold]", "/reset", "Once more", "/clear"]
    text = "\n\n  \n".join([*given, "/quit", "never read\n"])
    result = succeed("chat", "--model", folder, "--max-new-tokens", 4, input=text)
    lines = [line for line in result.output.splitlines() if line.startswith("> ")]
    assert lines == [f"> {line}" for line in given]
    assert result.output.count("4 tokens; ") == 3
    assert says(result, "; cut at --max-new-tokens 4")
    for name in COMMANDS:
        assert f"\n{name} " in result.output


def test_a_pipe_gets_the_answers_alone(folder, tmp_path):  # noqa: F811
    """As they were generated; titles, figures and commands are on standard error, unbroken."""
    given = ("--model", folder, "--max-new-tokens", 90, "--drafter", "none")
    texts = ("Say it", "Again")
    answers = [answered(tmp_path, *given, "--no-compare", "--prompt", x)["text"] for x in texts]
    assert set(answers[0]) & {chr(n) for n in range(32)}
    result = succeed("chat", *given, input="Say it\n/help\n/reset\nAgain\n/length 5\n")
    assert result.stdout_bytes.decode() == f"{answers[0]}\n\n{answers[1]}\n"
    for line in ("> Say it", "> /reset", "/length: 5"):
        assert line in result.stderr.splitlines()
    assert "\n/help " in result.stderr
    for option, prompt in ((), "/target\nSay it\n"), (("--show-drafts",), "Say it\n"):
        more = succeed("chat", *given, *option, input=prompt)
        assert "> Say it\n" in more.stdout
        for shown in (result.stderr, more.stdout):
            assert re.search(r"^90 tokens; .*; cut at --max-new-tokens 90$", shown, re.MULTILINE)


def test_the_prompt_of_a_chat_is_no_part_of_a_pipe(monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda prompt="": prompt + "typed")
    assert chat._typed(bracketed=True) == "typed"
    assert capsys.readouterr() == ("", chat.PROMPT)


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
    assert not chat._talk(conversation, interactive=True)  # nothing failed
    assert not interrupt.State.seen
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


def test_unknown_commands_are_refused_in_one_line(folder):  # noqa: F811
    start = ("chat", "--model", folder, "--max-new-tokens", 2)
    no = "error: there is no command"
    for text, line in (
        ("/foo", f"{no} '/foo'; /help lists all"),
        ("/", f"{no} '/'; /help lists all"),
        ("/?", f"{no} '/?'; /help lists all"),
        ("/gama 3", f"{no} '/gama'; did you mean '/gamma'? /help lists all"),
        ("/Spec", f"{no} '/Spec'; did you mean '/speculative'? /help lists all"),
        ("/show-drafts", f"{no} '/show-drafts'; did you mean '/drafts'? /help lists all"),
        ("/reset it", "error: /reset takes no value, got 'it'"),
        ("/quit it", "error: /quit takes no value, got 'it'"),
        ("/gamma 2 3", "error: /gamma takes one integer, got '2 3'"),
        ("/gamma -1", "error: /gamma must be an integer in [0, 1024], got -1"),
        ("/gamma 0", "error: /gamma must be at least 1, got 0; /speculative turns drafts off"),
        ("/length 0", "error: /length must be an integer in [1, 2147483647], got 0"),
        ("/processor top", "error: /processor must be one of greedy, multinomial, topk, nucleus, "
         "topknucleus, minp, got 'top'; did you mean 'topk'?"),
        ("/processor topk 1 2.5", "error: /processor topk takes temperature, top_k, got '1 2.5'"),
        ("/processor greedy 1", "error: /processor greedy takes no value, got '1'"),
        ("/processor nucleus 1 2", "error: --top-p must be in (0, 1], got 2.0"),
        ("/processor topk 0 3", "error: --top-k needs --temperature above 0: greedy decoding does "
         "not sample"),
        ("/drafter", "error: /drafter needs a drafter that is a language model, got --drafter "
         "auto"),
    ):  # fmt: skip
        result = invoke(*start, input=f"Hi\n{text}\n")
        assert line in result.output.splitlines(), text
        assert says(result, f"error: the command {text} was refused")
        assert result.exit_code == 1  # although the message was answered
    result = succeed(*start, input="/etc/hosts is a file\n")
    assert "2 tokens; " in result.output


def test_chat_goes_on_after_a_message_that_is_too_long(folder):  # noqa: F811
    for texts, code in ((f"{'word ' * 90}\nHi\n", 0), (f"Hi\n{'word ' * 90}\n", 1)):
        result = invoke("chat", "--model", folder, "--max-new-tokens", 2, input=texts)
        assert (result.exit_code, result.output.count("\n2 tokens; ")) == (code, 1)
        assert "error: prompt of sequence 0 has" in result.output
        assert says(result, "error: the last message was not answered") is bool(code)


def test_chat_goes_on_after_a_line_that_is_no_text(folder):  # noqa: F811
    """It ended, and the conversation was lost."""
    cut = "Grüße".encode()[:3]
    for wrong, where in ((b"\xff\xfe", 0), (b"a\xffb", 1), (cut, 2), (b"/help \xff", None)):
        start = ("chat", "--model", folder, "--max-new-tokens", 2)
        result = invoke(*start, input=b"Say it\n" + wrong + b"\nAgain\n")
        assert (result.exit_code, result.output.count("2 tokens; ")) == (0, 2), result.output
        if where is not None:
            assert says(result, f"error: the message is not valid UTF-8 at character {where}")
        last = invoke(*start, input=b"Say it\n" + wrong + b"\n")
        assert (last.exit_code, last.output.count("2 tokens; ")) == (1, 1)
    assert succeed(*start, input=b"\xef\xbb\xbfSay it\n").output.count("2 tokens; ") == 1


def test_a_line_that_is_no_text_leaves_the_conversation_as_it_was(conversation, monkeypatch):
    texts = ["Say it", "a\udcff", "Again"]
    monkeypatch.setattr(chat, "read_messages", lambda interactive: iter(texts))
    for interactive in (True, False):
        conversation.reset()
        assert not chat._talk(conversation, interactive)
        said = [message["content"] for message in conversation.messages]
        assert said[::2] == ["Say it", "Again"]


@pytest.fixture
def drafting(folder):  # noqa: F811
    """A conversation whose settings commands may change, with a draft model."""
    given = Settings(
        model=str(folder), drafter=["layers:1"], max_new_tokens=12, guard="off", seed=4
    )
    settings = replace(given, sampling=dict(given.sampling))
    loaded = load(settings, check(settings), lambda text: None)
    return Conversation(loaded, make_decoder(settings, loaded.drafter), settings, View(), given)


def said(conversation, capsys, *texts):
    """What commands print, all of which are obeyed."""
    capsys.readouterr()
    for text in texts:
        assert run_command(conversation, text)
    return capsys.readouterr().out


def test_commands_change_how_the_next_answer_is_made(drafting, capsys):
    """Those that are refused leave all as it was."""
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
    kept = drafting.settings, drafting.given, drafting.decoder
    assert not run_command(drafting, "/processor minp 1 3")
    assert (drafting.settings, drafting.given, drafting.decoder) == kept
    assert said(drafting, capsys, "/processor greedy", "/speculative") == (
        "/processor: greedy\n/speculative: off\n"
    )
    drafting.reset()
    plain = drafting.answer("Say it")
    assert (plain.tokens, plain.stats.drafted) == (greedy.tokens, 0)
    assert said(drafting, capsys, "/speculative") == "/speculative: on\n"
    drafting.reset()
    assert drafting.answer("Say it").stats.drafted > 0
    assert "/gamma N" in said(drafting, capsys, "/help")


def test_the_cache_of_an_answer_serves_the_next_one_unless_it_is_switched_off(
    conversation, monkeypatch, capsys
):
    given = streams(conversation, monkeypatch)
    conversation.answer("Say it")
    conversation.answer("Again")
    assert said(conversation, capsys, "/cache") == "/cache: off\n"
    conversation.answer("And now?")
    assert [past is not None for past in given] == [False, True, False]


def test_other_answers_are_those_of_the_models_alone(drafting, capsys):
    said(drafting, capsys, "/target", "/drafter", "/ngram", "/debug", "/gamma 4")
    turn = drafting.answer("Say it")
    capsys.readouterr()
    drafting.show_more(turn)
    shown = capsys.readouterr().out
    loaded, messages = drafting.loaded, drafting.messages[:-1]
    inputs = encode(loaded.tokenizer, messages, "cpu")
    (small,) = loaded.draft_models()
    assert small.model is not loaded.model
    texts = []
    for name, model in (("target", loaded.model), ("drafter layers:1", small.model)):
        ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
        text = loaded.tokenizer.decode(ids[turn.prompt_tokens :], skip_special_tokens=True)
        head = f"{name} alone\n{visible(text)}\n{len(ids) - turn.prompt_tokens} tokens, "
        assert head in shown
        texts.append(text)
    assert texts[0] != texts[1]
    assert texts[0] == drafting.messages[-1]["content"]
    assert "drafted by nasd\n" in shown
    assert "uniform" in shown  # of the table of decisions
    for name in ("/target", "/drafter", "/ngram", "/debug"):
        assert said(drafting, capsys, name) == f"{name}: off\n"
    drafting.show_more(drafting.answer("Again"))
    assert "alone" not in capsys.readouterr().out


def test_rejected_drafts_are_shown_and_are_no_part_of_the_conversation(folder):  # noqa: F811
    start = (
        "chat", "--model", folder, "--max-new-tokens", 16, "--drafter", "layers:1", "--guard",
        "off",
    )  # fmt: skip
    message = "Say: the cat sat\n"
    shown = succeed(*start, "--show-drafts", input=message).output
    assert "×drafted and rejected×" in shown
    assert shown.count("×") > 2
    clean = succeed(*start, input=message).output
    assert not set("×«‹") & set(clean)
    switched = succeed(*start, input=f"{message}/drafts\n/reset\n{message}/drafts\n").output
    before, _, after = switched.partition("> /drafts\n")
    text = before.partition("sat\n")[2].splitlines()[0]
    assert text == clean.partition("sat\n")[2].splitlines()[0]
    assert not set("×«‹") & set(before)
    assert after.startswith("«drafted and accepted»  ×drafted and rejected×")
    assert "/drafts: on\n" in after
    marked = after.partition("sat\n")[2].splitlines()[0]
    assert marked in shown
    assert after.endswith("/drafts: off\n")


def test_without_a_template_a_message_is_continued_as_text(tmp_path):
    bare = cli_models.write_folder(tmp_path, template=None)
    start = ("chat", "--model", bare, "--max-new-tokens", 3)
    line = one_line_error(*start)
    assert line.endswith("; with --no-chat-template the model continues each message as text")
    result = succeed(*start, "--no-chat-template", input="Say it\nSay it\n")
    first, second = result.stdout.removesuffix("\n").split("\n\n")
    assert first == second  # no memory


def test_the_drafters_of_a_cascade_answer_alone_one_by_one(folder):  # noqa: F811
    result = succeed(
        "chat", "--model", folder, "--max-new-tokens", 4, "--drafter", "layers:1", "--drafter",
        "prompt_lookup", "--cascade", "vertical", "--alone", "--trace",
        input="Say it\n/ngram\nAgain\n/exit\nnever read\n",
    )  # fmt: skip
    assert result.output.count("drafter layers:1 alone\n") == 2
    assert result.output.count("target alone\n") == 2
    assert says(result, "round position token")
    assert says(result, "note: --drafter prompt_lookup has no text of its own")
    assert "drafted by nasd\n" in result.output
