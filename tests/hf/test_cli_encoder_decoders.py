"""Encoder-decoders on the command line: texts of `generate` and `bench`, and refusals."""

import json

import pytest
from support import cli_models, hf_models
from support.cli_models import invoke, one_line_error, reported, says
from transformers import AutoModelForSeq2SeqLM

TEXT = "the story of a bear, the story of a cat, the story of"


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return cli_models.write_encoder_decoder(tmp_path_factory.mktemp("t5"))


def plain_text(path, text, new_tokens):
    model = AutoModelForSeq2SeqLM.from_pretrained(path)
    inputs = cli_models.tokenizer(None)(text, return_tensors="pt")
    ids = model.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=False,
        max_new_tokens=new_tokens,
    )  # fmt: skip
    return ids[0, 1:].tolist()


@pytest.mark.parametrize("drafter", ["suffix_automaton", "model"])
def test_generate_answers_with_an_encoder_decoder(t5, tmp_path, drafter):
    report, result = reported(
        tmp_path, "generate", "--model", t5, "--prompt", TEXT, "--drafter",
        t5 if drafter == "model" else drafter, "--max-new-tokens", 12, "--guard", "off", "--trace",
        "--alone",
    )  # fmt: skip
    assert says(result, "greedy outputs identical yes")
    turn = report["prompts"][0]["turns"][0]
    assert turn["tokens"] == plain_text(t5, TEXT, 12)
    assert len(turn["tokens"]) == 12
    said = [token for one in turn["rounds"] for token in one if token["kind"] != "rejected"]
    assert [token["token"] for token in said] == turn["tokens"]
    if drafter == "model":
        assert turn["stats"]["accepted"] > 0
        assert [one["text"] for one in turn["alone"]] == [turn["text"]] * 2
    else:
        assert says(result, f"note: --drafter {drafter} has no text of its own")


@pytest.mark.build  # a tool of the laboratory
def test_bench_pads_the_prompts_of_an_encoder_on_the_right(tmp_path):
    """Where an encoder counts its positions from the left, padding there would change texts."""
    bart = cli_models.write_encoder_decoder(tmp_path / "bart", "bart")
    questions = tmp_path / "questions.jsonl"
    texts = ["the story of a bear", "why?"]
    questions.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    report, _ = reported(
        tmp_path, "bench", "--questions", questions, "--model", bart, "--drafter",
        "suffix_automaton", "--batch-size", 2, "--max-new-tokens", 6, "--runs", 1,
    )  # fmt: skip
    (content,) = report["results"]
    wanted = [plain_text(bart, text, 6) for text in texts]
    assert wanted[0] != wanted[1]
    for row in content["rows"]:
        assert row["identical"] == row["texts"] == 1
        (answer,) = row["answers"]
        assert answer["texts"] == wanted


def test_other_commands_refuse_encoder_decoders_by_name(t5, tmp_path):
    result = invoke("train", "--model", t5, "--output", tmp_path / "head")
    assert result.exit_code == 2
    assert "is of type 't5', which Transformers does not list among causal la" in result.output
    assert "chat needs a chat template, which" in one_line_error("chat", "--model", t5)
    (tmp_path / "questions.jsonl").write_text('{"turns": ["a"]}\n')
    asked = ("bench", "--model", t5, "--questions", tmp_path / "questions.jsonl", "--drafter")
    assert "drafter early_exit needs" in one_line_error(*asked, "early_exit:1", code=1)
    hf_models.encoder_decoder("whisper").save_pretrained(tmp_path / "sounds")
    line = one_line_error("generate", "--prompt", "a", "--model", tmp_path / "sounds")
    assert "is of type 'whisper'" in line
