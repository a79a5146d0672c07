"""The command ``bench`` measures what it names, on every prompt, and writes it twice."""

import itertools
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from specdec_hf.api import SpeculativeDecoder
from specdec_hf.cli.checks import Settings
from specdec_hf.cli.speeds import GENERATE
from specdec_hf.drafters.ngram_table import NgramTable
from specdec_hf.lab.bench import configs as bench_configs
from specdec_hf.lab.bench import results, summary
from specdec_hf.lab.bench import runs as bench_runs
from specdec_hf.lab.bench.efficiency import forward_costs, predict, round_costs
from specdec_hf.lab.bench.runs import WITHOUT, Answer, Batch, Config, Turns
from specdec_hf.loop.round_record import RoundRecord
from specdec_hf.loop.statistics import SequenceStats, SpecStats
from specdec_hf.runner.protocol import CACHE_NAME
from specdec_hf.schedules.costs import MonotoneCost
from support import hf_models
from support.cli_models import END, folder, home, masked, reported, succeed  # noqa: F401

from specdec_kernels.analysis import walltime_factor

pytestmark = pytest.mark.build

SCHEDULE = "--num-assistant-tokens-schedule"
LINES = "".join(
    json.dumps({"question_id": n, "category": category, "turns": [f"Say {n} one two one"]}) + "\n"
    for n, category in enumerate("aabbb")
)


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(LINES)
    return path


@pytest.fixture
def bench(folder, questions, tmp_path):  # noqa: F811
    """Runs the command on the questions; the results in its report."""
    asked = ("bench", "--questions", questions, "--model", folder)
    return lambda words: reported(tmp_path, *asked, *words.split())[0]["results"]


def test_bench_compares_drafters_and_schedules(bench, tmp_path):
    markdown = tmp_path / "out.md"
    found = bench(
        "--limit 1 --max-new-tokens 6 --drafter prompt_lookup --drafter layers:1 --drafter "
        f"prompt_lookup+ngram {SCHEDULE} constant {SCHEDULE} heuristic {SCHEDULE} optimal --dtype "
        f"float32 --dtype bfloat16 --runs 2 --markdown {markdown}"
    )
    assert [entry["dtype"] for entry in found] == ["float32", "bfloat16"]
    assert [entry["runs"] for entry in found] == [2, 2]
    names = [row["name"] for row in found[0]["rows"]]
    assert names == [
        GENERATE, "prompt lookup, Transformers", WITHOUT, "prompt_lookup",
        "prompt_lookup, heuristic", "prompt_lookup, optimal", "layers:1", "layers:1, heuristic",
        "layers:1, optimal", "prompt_lookup+ngram, tree", "prompt_lookup+ngram, tree, optimal",
    ]  # fmt: skip
    for row in found[0]["rows"]:
        assert row["identical"] == row["texts"] == 2
        assert [answer["prompts"] for answer in row["answers"]] == [["0"], ["2"]]
        seconds = sum(answer["seconds"] for answer in row["answers"])
        assert all(a["seconds"] == np.median(a["seconds_of_runs"]) for a in row["answers"])
        tokens = sum(len(answer["texts"][0]) for answer in row["answers"])
        assert row["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert found[0]["rows"][2]["tokens_per_round"] == 1
    assert found[0]["rows"][0]["ratio"] == pytest.approx(1)
    text = markdown.read_text()
    assert text.count("| prompt_lookup, heuristic |") == 6  # two lines and a column for each dtype
    assert "| b | " in text
    assert "2 of 2" in text


BENCHED = """
tiny, float32, cpu, # threads, # prompts, greedy, # new tokens, median of #
tokens/s ratio # % library speculation # % same
model.generate ## without drafts, specdec ## layers:1, guard off ##
Rounds median tau alpha bound eff. loop
model.generate # without drafts, specdec ## layers:1, guard off ##
Ratio by category, in brackets speculation; below #
without drafts, specdec a # b # layers:1, guard off a # (#) b # (#)
ratio: over model.generate; library: without drafts over model.generate, in the same turns;
speculation: with drafts over without
"""


@pytest.mark.usefixtures("home")
def test_bench_prints_this(questions):
    """The clock decides the notes at the end. Where nothing is drafted, two rows are left."""
    asked = ("bench", "--model", "tiny", "--questions", questions, "--limit", 1, "--peer", "none")
    asked += ("--max-new-tokens", 16, "--runs", 1, "--drafter")
    printed = succeed(*asked, "layers:1", "--guard", "off").output
    hidden = (r" \([\w-]+, \w+\)", r" !", r"forward of the target.*")
    assert masked(printed, *hidden) == " ".join(BENCHED.split())
    report, _ = reported(questions.parent, *asked, "none")
    (content,) = report["results"]
    assert [row["name"] for row in content["rows"]] == [GENERATE, WITHOUT]
    assert [order for a in content["rows"][1]["answers"] for order in a["orders"]] == ["pm", "mp"]


def test_bench_says_which_configs_are_lossy(bench):
    (result,) = bench(
        "--limit 1 --max-new-tokens 16 --drafter layers:1 --drafter auto --rule lenient "
        "--lenience 0.05 --guard off --runs 1"
    )
    *others, model, chains = result["rows"]
    assert model["name"] == "layers:1, lossy rule lenient 0.05, guard off"
    assert chains["name"] == "auto, lossy rule lenient 0.05, guard off"
    assert model["identical"] < model["texts"]
    for row in (model, chains):
        assert any("is lossy" in note for note in row["notes"])
    for row in others:
        assert "lossy" not in row["name"]
        assert row["identical"] == row["texts"]
    chosen = Settings(drafter=["layers:1"], rule="token", ablate="residual")
    loaded = SimpleNamespace(drafters=[None], dtype="float32", model=None)
    configs, _ = bench_configs.make_configs([chosen], loaded, (), None)
    assert configs[-1].name == "layers:1, rule token, lossy without the residual"


def test_ragged_batches_are_compared_greedily_and_sampled(bench):
    greedy, sampled = bench(
        "--max-new-tokens 5 --drafter layers:1 --peer assisted --peer llama.cpp --batch-size 2 "
        "--temperature 0 --temperature 0.7 --top-p 0.9 --runs 1"
    )
    assert (greedy["batch_size"], sampled["temperature"], sampled["top_p"]) == (2, 0.7, 0.9)
    assert set(greedy["left_out"]) == {"llama.cpp", "assisted, Transformers"}
    names = [row["name"] for row in greedy["rows"]]
    assert names == [GENERATE, WITHOUT, "layers:1"]
    for row, other in zip(greedy["rows"], sampled["rows"], strict=True):
        # Five prompts make two batches, each of categories in turns.
        assert [answer["prompts"] for answer in row["answers"]] == [["0", "2"], ["1", "3"]]
        assert (row["identical"], other["identical"], row["categories"]) == (2, None, {})
        assert all(1 <= len(text) <= 5 for a in row["answers"] for text in a["texts"])


def test_the_baselines_of_speculative_sampling_take_part(bench):
    greedy, sampled = bench(
        "--max-new-tokens 5 --drafter layers:1 --peer rejection --peer best_of --limit 1 "
        "--temperature 0 --temperature 0.7 --runs 1"
    )
    names = ["rejection sampling, A.2", "best of 4 chains"]
    rows = {row["name"]: row for row in greedy["rows"]}
    assert all(rows[name]["identical"] == rows[name]["texts"] for name in names)
    assert rows[names[1]]["tokens_per_round"] >= rows[names[0]]["tokens_per_round"] >= 1
    assert rows[GENERATE]["tokens_per_round"] is None
    assert names[0] in [row["name"] for row in sampled["rows"]]
    assert "the longest of sampled chains is biased" in sampled["left_out"][names[1]]


def in_turns(monkeypatch, answer, configs, batches, runs):
    """The turns of configs whose answers are faked."""
    monkeypatch.setattr(bench_runs, "_answer", answer)
    monkeypatch.setattr(bench_runs, "_generate", lambda *_: None)
    ids = {"input_ids": torch.ones(1, 2)}
    prompts = [Batch([str(n)], "ab"[n % 2], ids) for n in range(batches)]
    loaded, arguments = SimpleNamespace(model=None), {"max_new_tokens": 2}
    taken, left_out = bench_runs.warm_up(loaded, configs, prompts, arguments, str)
    assert not left_out
    return bench_runs.run_turns(loaded, taken, prompts, arguments, runs, str)


def test_texts_must_equal_those_of_the_reference(monkeypatch):
    """Those of other ways to generate must equal those of plain Transformers all the same."""
    texts = {GENERATE: [[1]], "peer": [[1]], WITHOUT: [[2]], "equal": [[2]], "other": [[1]]}

    def answer(model, config, batch, arguments):
        return Answer(batch.prompts, "", texts[config.name], 1.0, [1.0])

    decoder = SpeculativeDecoder()
    without = Config(WITHOUT, decoder, without_drafts=True, reference=True)
    drafting = [Config("equal", decoder), Config("other", decoder)]
    turns = in_turns(
        monkeypatch, answer, [Config(GENERATE), Config("peer"), without, *drafting], 1, 1
    )
    same = {name: each[0].mine.identical for name, each in turns.items()}
    assert same == {"peer": True, "equal": True, "other": False}
    assert all(each[0].generate.identical for each in turns.values())
    assert turns["equal"][0].without_drafts.identical
    alone = in_turns(monkeypatch, answer, [Config(GENERATE), without], 1, 1)
    assert alone[WITHOUT][0].mine.identical


def measured(monkeypatch, seconds, drafts=None):
    """The rows of faked answers and their calls; ``seconds`` takes config and number of a call.

    With ``drafts``, how many of an answer are accepted, the config drafts in turns of three.
    """
    calls = []

    def answer(model, config, batch, arguments):
        calls.append(config.name)
        took = seconds(config.name, calls.count(config.name))
        accepted = drafts if config.name == "fast" else 0
        text = [[1, 2]]
        return Answer(
            batch.prompts, batch.category, text, took, [took], drafted=2, accepted=accepted
        )

    every = [Config(GENERATE), Config("peer")]
    if drafts is not None:
        without = Config(WITHOUT, SpeculativeDecoder(None), without_drafts=True)
        every = [Config(GENERATE), without, Config("fast", SpeculativeDecoder())]
    turns = in_turns(monkeypatch, answer, every, 6, 3)
    return summary.rows_of(every, turns, None, sampled=False), calls


@pytest.mark.parametrize("accepted", [1, 0], ids=["accepted", "none accepted"])
def test_drafts_are_credited_with_what_they_add_to_this_library_alone(monkeypatch, accepted):
    """Forwards of this library are 2 times as fast as the others, and drafts of it 1.25 times."""
    took = {GENERATE: 5.0, WITHOUT: 2.5, "fast": 2.0}
    rows, calls = measured(monkeypatch, lambda name, call: took[name], accepted)
    names = [row.name for row in rows]
    turns = Counter(zip(calls[::3], calls[1::3], calls[2::3], strict=True))
    assert names == [*took]
    assert turns == Counter(dict.fromkeys(itertools.permutations(took), 3)), "each order as often"
    _, without, fast = rows
    gain = (1.25, (1.25, 1.25)) if accepted else (None, None)
    assert (fast.ratio, fast.interval, fast.speeds.library) == (2.5, (2.5, 2.5), 2)
    assert (fast.speeds.speculation, fast.speculation_interval) == gain
    assert {one.speculation for one in fast.categories.values()} == {gain[0]}
    assert (without.ratio, without.interval, without.speeds.speculation) == (2, (2, 2), None)
    assert [row.notes for row in rows] == [[], [], []]
    line = [
        cell.strip() for cell in results.markdown_text("", rows, []).split("| fast |")[1].split("|")
    ]
    assert line[:6] == (
        ["1.0", "2.50", "2.50-2.50", "2.00", "1.25", "1.25-1.25"] if accepted
        else ["1.0", "2.50", "2.50-2.50", "2.00", "", ""]
    )  # fmt: skip
    shown = "| a | 2.00 | 2.50 (1.25) |" if accepted else "| a | 2.00 | 2.50 |"
    assert shown in results.markdown_text("", rows, [])


@pytest.mark.parametrize(
    ("side", "word"),
    [("fast", "it"), (GENERATE, GENERATE), (WITHOUT, "this library without drafts")],
)
def test_a_warm_up_that_one_side_pays_for_is_flagged(monkeypatch, side, word):
    rows, _ = measured(monkeypatch, lambda name, call: 9.0 if (name, call) == (side, 1) else 1.0, 1)
    assert rows[2].notes == [
        f"unfair: the first answer of {word} took 9.0 times the seconds of the same later"
    ]
    assert rows[2].ratio == 1  # by the median


def test_an_effect_of_the_order_is_flagged_with_the_side_that_has_it(monkeypatch):
    """What answers after this library without drafts takes twice as long."""
    made = []

    def seconds(name, call):
        made.append(name)
        turn = made[(len(made) - 1) // 3 * 3 :]
        return 2.0 if name == "fast" and WITHOUT in turn else 1.0

    rows, _ = measured(monkeypatch, seconds, 1)
    (note,) = rows[2].notes
    assert "unfair: the ratio over this library without drafts depends on which" in note


def test_a_plus_in_the_path_of_a_file_or_folder_merges_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("draft+nasd").mkdir()
    Path("prompt_lookup+nasd").mkdir()
    NgramTable.build([np.array([1, 2])], END + 1, 2).save("a+nasd")
    names = {
        "prompt_lookup+ngram:a+nasd+nasd": ["prompt_lookup", "ngram:a+nasd", "nasd"],
        "draft+nasd+prompt_lookup": ["draft+nasd", "prompt_lookup"],
        "prompt_lookup+layers:1": ["prompt_lookup", "layers:1"],
        "prompt_lookup+nasd": ["prompt_lookup", "nasd"],
        "ngram:~/a+nasd": ["ngram:~/a+nasd"],
        "~/draft+nasd+nasd": ["~/draft+nasd", "nasd"],
    }
    assert {name: bench_configs.merged(name) for name in names} == names


def test_a_synthetic_model_is_labelled_and_accepts_as_often_as_asked(tmp_path):
    report, result = reported(
        tmp_path, "bench-synthetic", "--shape", "tiny", "--acceptance", 0.5, "--acceptance", 1,
        "--dtype", "bfloat16", "--batch-size", 2, "--limit", 1, "--runs", 1, "--prompt-tokens", 9,
        "--max-new-tokens", 48, "--markdown", tmp_path / "out.md",
    )  # fmt: skip
    (content,) = report["results"]
    assert content["synthetic"] is True
    plain, _, half, whole = content["rows"]
    text = plain["answers"][0]["texts"][0]
    assert np.all(np.diff(text) % 512 == 1)
    assert (whole["alpha"], whole["identical"]) == (1, 1)
    assert half["alpha"] == pytest.approx(0.5, abs=0.2)
    for words in (result.output, (tmp_path / "out.md").read_text(), content["title"], half["name"]):
        assert "SYNTHETIC" in words


# Theorem 3.8 with measured acceptance and costs, and the efficiency against it.

STEP, DRAFT, VERIFY, HOST, GAMMA = 0.1, 0.04, 0.15, 0.01, 4  # seconds of each, and drafts
BOUND = walltime_factor(1.0, GAMMA, DRAFT / GAMMA / STEP, VERIFY / STEP)


def call(accepted):
    """Statistics of the prompt's round and of rounds that draft ``GAMMA`` tokens."""
    stats, began = SpecStats(sequences=[SequenceStats()]), 0.0
    for width, verify, kept in [(0, 1.0, 0), *((GAMMA, VERIFY, kept) for kept in accepted)]:
        draft = DRAFT if width else 0.0
        record = RoundRecord(began, draft, verify, HOST, 0.0, 0.0, [width], [kept], [kept + 1])
        began += record.seconds
        stats.record_round(width, record)
        stats.sequences[0].record(width, kept, kept + 1)
    stats.total_seconds = began
    return stats


def curve(verify=VERIFY):
    costs = MonotoneCost()
    costs.observe(1, STEP)
    costs.observe(1 + GAMMA, verify)
    return costs


def row(costs):
    """The row of a drafter whose drafts are all accepted, in ten rounds after the prompt's."""
    stats = call([GAMMA] * 10)
    seconds = 10 * (DRAFT + VERIFY + HOST)
    text = [list(range(51))]
    mine = Answer(["p"], "", text, 1 + seconds, [1.0], 50, seconds, rounds=11, stats=stats)
    plain = Answer(["p"], "", text, 6.0, [6.0], 50, 50 * STEP)
    turns = {"drafter": [Turns(mine, plain, ["pm"])]}
    return summary.rows_of([Config(GENERATE), Config("drafter")], turns, costs, sampled=False)[1]


def test_the_bound_is_theorem_3_8_and_the_efficiency_what_the_loop_leaves_of_it():
    found = row(curve())
    assert (found.alpha, found.theorem) == (1, pytest.approx(BOUND))
    assert found.efficiency == pytest.approx((DRAFT + VERIFY) / (DRAFT + VERIFY + HOST))
    wrong = "costs or acceptance are not those"
    assert not any(wrong in note for note in found.notes)
    found = row(curve(verify=2 * VERIFY))  # an efficiency above 1 is flagged
    assert found.efficiency > 1.5
    assert any(wrong in note for note in found.notes)


def test_predictions_from_rounds():
    """Drafting is a forward or a part of the loop; drafts after a rejection are not visited."""
    stats = [call([GAMMA] * 3)]
    shares = [predict(stats, curve(), drafts_on_host=host).loop_share for host in (False, True)]
    whole = DRAFT + VERIFY + HOST
    assert shares == pytest.approx([HOST / whole, (HOST + DRAFT) / whole])
    assert predict([call([0, 4, 1])], curve(), drafts_on_host=True).alpha == 5 / 7
    assert predict([call([])], curve(), drafts_on_host=True) is None
    tree = call([0, 2])
    tree.tree = "4 nodes"
    found = predict([tree], curve(), drafts_on_host=True)
    assert found.alpha is None
    assert found.tokens == pytest.approx(4 / (2 * (DRAFT + VERIFY)))
    assert round_costs([call([0, 4])]).medians() == {1 + GAMMA: VERIFY}, "without the prompt"
    assert curve().scaled(2).medians() == {1: 2 * STEP, 1 + GAMMA: 2 * VERIFY}


def test_forwards_are_timed_behind_a_prompt_that_stays_as_long():
    model = hf_models.build("llama")
    widths = []
    model.register_forward_pre_hook(
        lambda module, _, given: widths.append(
            (given["input_ids"].shape[1], given[CACHE_NAME].get_seq_length())
        ),
        with_kwargs=True,
    )
    ids = torch.ones(2, 7, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found = forward_costs(model, inputs, [5, 3])
    assert sorted(found.medians()) == [1, 3, 5]
    assert set(widths) == {(7, 0), (1, 7), (3, 7), (5, 7)}
