"""The options of the loop are declared once: what is made of the declaration, and the documents."""

import inspect
import re
import textwrap
from dataclasses import fields

import pytest
import typer
from specdec_hf import SpeculativeDecoder, generate
from specdec_hf.cli.app import app
from specdec_hf.options import ALIASES, COMMON, Options
from support.sources import ROOT

OWN_WORDS = {"drafter", "tree", "guard"}  # of the command line, whose values are others
PAGE = ROOT / "docs" / "loop.md"

pytestmark = pytest.mark.quick


def link(found):
    page, section = found["page"], found["section"]
    label = section[1:].replace("-", " ") if section else page
    return f"[{label}]({'' if page == PAGE.name and section else page}{section})"


def listed():
    """Each option with its default and text, as the page has it."""
    for option in fields(Options):
        if option.name not in ALIASES:
            value = option.default
            default = (
                f"{value.__module__}.{value.__name__}"
                if callable(value)
                else repr(value).replace("'", '"')
            )
            text = option.metadata["text"].replace("``", "`")
            text = re.sub(r"docs/(?P<page>[\w-]+\.md)(?P<section>(#[\w-]+)?)", link, text)
            item = f"`{option.name}={default}`: {text}"
            yield textwrap.fill(
                item, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
            )


@pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not here")
def test_the_page_lists_the_options():
    text = "\n".join(listed())
    assert f"\n\n{text}\n\n" in PAGE.read_text(), text


def test_help_has_every_option_with_its_type_default_and_text():
    signature = inspect.signature(generate).parameters
    shown = " ".join(inspect.getdoc(generate).split())
    for option in fields(Options):
        parameter = signature[option.name]
        assert (parameter.annotation, parameter.default) == (option.type, option.default)
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert f"{option.name}: {option.metadata['text']}" in shown
    assert "OPTIONS" not in shown


def test_a_decoder_takes_the_same_options():
    mine = inspect.signature(SpeculativeDecoder).parameters.keys()
    assert mine - {"tokenizer", "stop_strings"} == {option.name for option in fields(Options)}


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_command_line_takes_the_common_options_with_their_texts(command):
    found = {one.name: one for one in typer.main.get_command(app).commands[command].params}
    assert found.keys() >= COMMON.keys()
    for name in COMMON.keys() - OWN_WORDS:
        sentence, _, _ = COMMON[name].metadata["text"].partition(". ")
        assert found[name].help.lower().startswith(sentence.lower())
