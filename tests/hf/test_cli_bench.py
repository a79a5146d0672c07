"""The command ``bench`` measures what it names, on every prompt, and writes it twice."""

import itertools
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from specdec_hf.cli.speeds import GENERATE
from specdec_hf.decoder import SpeculativeDecoder
from specdec_hf.heads.eagle3.files import save_head
from specdec_hf.loop.statistics import RoundRecord, SequenceStats, SpecStats
from specdec_hf.schedules.costs import MonotoneCost
from specdec_lab.bench import configs as bench_configs
from specdec_lab.bench import efficiency, results, summary
from specdec_lab.bench import runs as bench_runs
from specdec_lab.bench.runs import WITHOUT, Config, PromptBatch, TimedAnswer, Turns
from support import cli_models, hf_models
from support.cli_models import masked, reported, succeed
from support.hf_models import head_for
from transformers import MambaConfig, MambaForCausalLM

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
def bench(folder, questions, tmp_path):
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
    assert "| prompt_lookup, heuristic |" in markdown.read_text()


BENCHED = """
tiny, float32, cpu, # threads, # prompts, greedy, # new tokens, median of #
tokens/s ratio # % library speculation # % same
model.generate ## without drafts, specdec ## layers:1, guard off ##
Rounds decode GB/s median tau alpha bound eff. loop
model.generate ## without drafts, specdec ## layers:1, guard off ##
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


def test_ragged_batches_are_compared_greedily_and_sampled(bench):
    greedy, sampled = bench(
        "--max-new-tokens 5 --drafter layers:1 --peer assisted --peer best_of --batch-size 2 "
        "--temperature 0 --temperature 0.7 --top-p 0.9 --runs 1 --peer prompt_lookup"
    )
    assert (greedy["batch_size"], sampled["temperature"], sampled["top_p"]) == (2, 0.7, 0.9)
    for peer in ("assisted", "prompt lookup"):
        assert greedy["left_out"][f"{peer}, Transformers"] == "it takes one sequence only"
    names = [row["name"] for row in greedy["rows"]]
    assert names == [GENERATE, WITHOUT, "layers:1"]
    for row, other in zip(greedy["rows"], sampled["rows"], strict=True):
        # Five prompts make two batches, each of categories in turns.
        assert [answer["prompts"] for answer in row["answers"]] == [["0", "2"], ["1", "3"]]
        assert (row["identical"], other["identical"], row["categories"]) == (2, None, {})
        assert all(1 <= len(text) <= 5 for a in row["answers"] for text in a["texts"])


def test_what_a_model_with_a_state_lacks_is_left_out_in_a_line(bench, monkeypatch, tmp_path):
    def forward_costs(*arguments):
        raise RuntimeError("no layer can be cropped\nfor it keeps a state")

    monkeypatch.setattr(efficiency, "forward_costs", forward_costs)
    config = MambaConfig(vocab_size=258, hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    cli_models.tokenizer().save_pretrained(tmp_path / "mamba")
    (result,) = bench(f"--model {tmp_path / 'mamba'} --limit 1 --drafter none --max-new-tokens 4")
    assert list(result["left_out"]) == ["prompt lookup, Transformers", "efficiency"]
    assert result["left_out"]["efficiency"] == "RuntimeError: no layer can be cropped"
    assert [row["identical"] for row in result["rows"]] == [2, 2]


STAND_IN = """  # a token tells the temperature, one ends the prompt, one is the size of the file
import os
from types import SimpleNamespace
__version__, StreamerBase, StreamingStatus = "0.1-build", object, SimpleNamespace(RUNNING=0)
SchedulerConfig, Tensor = SimpleNamespace, lambda array: array.tolist()
GenerationConfig = lambda **given: SimpleNamespace(**{"temperature": 0, **given})
Core = lambda: SimpleNamespace(get_property=lambda *_: SimpleNamespace(to_string=lambda: "bf16"))
class Llama:
    def __init__(self, path, *_, prompt_lookup=False, scheduler_config=None, **options):
        assert scheduler_config is None or not scheduler_config.enable_prefix_caching
        self.file, self.sizes = os.path.getsize(path) % 100, [2, 1] if prompt_lookup else [0, 1, 1]
    reset = set_seed = print  # as libraries do
    def generate(self, prompt, temp=0, streamer=None, **sampling):
        if streamer is None:
            return iter([round(10 * temp), prompt[-1], self.file, 7])
        for size in self.sizes:  # one token comes as a number, several as a list
            streamer.write(list(range(size)) if size else 5)
        return SimpleNamespace(tokens=[[round(10 * temp.temperature), prompt[0][-1], self.file]])
LLMPipeline = Llama
"""


def test_peers_of_another_process_read_the_file_and_the_prompt(bench, monkeypatch, tmp_path):
    file = cli_models.write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SPECDEC_PEER_PYTHON", sys.executable)
    monkeypatch.setenv("SPECDEC_PEER_OPENVINO", str(file))
    for name in ("llama_cpp", "openvino", "openvino_genai"):
        (tmp_path / f"{name}.py").write_text(STAND_IN)
    asked = f"--model {file} --limit 1 --runs 1 --drafter none --peer llama.cpp --peer openvino"
    for result in bench(f"{asked} --max-new-tokens 3 --temperature 0 --temperature 0.5"):
        rows = [row for row in result["rows"] if row["name"].startswith(("llama", "openv"))]
        assert [row["name"] for row in rows] == [
            "llama.cpp, weights of unknown type, llama-cpp-python 0.1-build",
            "openvino, tiny.gguf, bf16, openvino-genai 0.1",
            "openvino, prompt lookup, tiny.gguf, bf16, openvino-genai 0.1",
        ]
        text = [round(10 * result["temperature"]), 29, file.stat().st_size % 100]
        for row, later in zip(rows, (2, 2, 1), strict=True):
            told = [(answer["texts"], answer["later_tokens"]) for answer in row["answers"]]
            assert (told, row["decode"] > 0) == ([([text], later)] * 2, True)
    (tmp_path / "llama_cpp.py").write_text("import os; os.abort()")
    (tmp_path / "openvino_genai.py").write_text("raise ImportError('none')")
    (result,) = bench(asked)
    assert result["left_out"]["llama.cpp"].startswith("it was ended by SIGABRT; `CMAKE_ARGS=")
    assert result["left_out"]["openvino"].startswith("ImportError: none; `pip install openvino")


def measured(monkeypatch, seconds, accepted):
    """The rows of faked answers, which take so many seconds by config, and their calls."""
    calls = []

    def answer(model, config, batch, arguments):
        calls.append(config.name)
        took, text = seconds[config.name], [1, 2 + (config.name == GENERATE)]
        return TimedAnswer(
            batch.prompts, batch.category, [text], took, [took], drafted=2,
            accepted=accepted if config.name == "fast" else 0,
        )  # fmt: skip

    monkeypatch.setattr(bench_runs, "_answer", answer)
    monkeypatch.setattr(bench_runs, "_generate", lambda *_: None)
    prompts = [PromptBatch([str(n)], "ab"[n % 2], hf_models.prompts((2,))) for n in range(6)]
    loaded, arguments = SimpleNamespace(model=None), {"max_new_tokens": 2}
    without = Config(WITHOUT, SpeculativeDecoder(None), without_drafts=True, reference=True)
    configs = [Config(GENERATE), without, Config("fast", SpeculativeDecoder())]
    taken, left_out = bench_runs.warm_up(loaded, configs, prompts, arguments, str)
    assert not left_out
    turns = bench_runs.run_turns(loaded, taken, prompts, arguments, 3, str)
    return summary.rows_of(configs, turns, None, sampled=False), calls


@pytest.mark.parametrize("accepted", [1, 0], ids=["accepted", "none accepted"])
def test_drafts_are_credited_with_what_they_add_to_this_library_alone(monkeypatch, accepted):
    """Forwards of this library are 2 times as fast as the others, and drafts of it 1.25 times."""
    took = {GENERATE: 5.0, WITHOUT: 2.5, "fast": 2.0}
    rows, calls = measured(monkeypatch, took, accepted)
    names = [row.name for row in rows]
    turns = Counter(zip(calls[::3], calls[1::3], calls[2::3], strict=True))
    assert names == [*took]
    assert [row.identical for row in rows] == [6, 6, 6], "to plain decoding of the same library"
    assert turns == Counter(dict.fromkeys(itertools.permutations(took), 3)), "each order as often"
    _, without, fast = rows
    gain = (1.25, (1.25, 1.25)) if accepted else (None, None)
    assert (fast.ratio, fast.interval, fast.speeds.library) == (2.5, (2.5, 2.5), 2)
    assert (fast.speeds.speculation, fast.speculation_interval) == gain
    assert {one.speculation for one in fast.categories.values()} == {gain[0]}
    assert (without.ratio, without.interval, without.speeds.speculation) == (2, (2, 2), None)
    assert [row.notes for row in rows] == [[], [], []]
    shown = "| a | 2.00 | 2.50 (1.25) |" if accepted else "| a | 2.00 | 2.50 |"
    assert shown in results.markdown_text("", rows, [])


def test_a_plus_in_the_path_of_a_folder_merges_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("draft+nasd").mkdir()
    names = {
        "prompt_lookup+layers:1": ["prompt_lookup", "layers:1"],
        "draft+nasd+prompt_lookup": ["draft+nasd", "prompt_lookup"],
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


STEP, DRAFT, VERIFY, HOST, GAMMA = 0.1, 0.04, 0.15, 0.01, 4  # seconds of each, and drafts
BOUND = walltime_factor(1.0, GAMMA, DRAFT / GAMMA / STEP, VERIFY / STEP)


def statistics():
    """Of the prompt's round and ten of which each accepts ``GAMMA`` drafts."""
    stats = SpecStats(sequences=[SequenceStats()])
    for width, verify, draft in [(0, 1.0, 0.0), *[(GAMMA, VERIFY, DRAFT)] * 10]:
        begin = stats.total_seconds
        record = RoundRecord(begin, draft, verify, HOST, 0.0, 0.0, [width], [width], [width + 1])
        stats.record_round(width, record)
        stats.sequences[0].record(width, width, width + 1)
        stats.total_seconds += record.seconds
    return stats


def curve(verify=VERIFY):
    costs = MonotoneCost()
    costs.observe(1, STEP)
    costs.observe(1 + GAMMA, verify)
    return costs


def test_the_bound_is_theorem_3_8_and_the_efficiency_what_the_loop_leaves_of_it():
    """Of a drafter whose drafts are all accepted, in ten rounds after the prompt's."""
    seconds, text = 10 * (DRAFT + VERIFY + HOST), [list(range(51))]
    mine = TimedAnswer(["p"], "", text, 1 + seconds, [1.0], 50, seconds, rounds=11)
    mine.stats = statistics()
    mine.stats.packed = SimpleNamespace(bytes=3e9, reason="")
    other = TimedAnswer(["p"], "", text, 6.0, [6.0], 50, 50 * STEP)
    turns = {"drafter": [Turns(mine, other, ["pm"])]}
    for verify, flagged in ((VERIFY, False), (2 * VERIFY, True)):
        rows = summary.rows_of(
            [Config(GENERATE), Config("drafter")], turns, curve(verify), sampled=False
        )
        notes = " ".join(rows[1].notes)  # an efficiency above 1 is flagged
        assert ("costs or acceptance are not those" in notes) is flagged is (rows[1].efficiency > 1)
        if not flagged:
            assert (rows[1].alpha, rows[1].theorem) == (1, pytest.approx(BOUND))
            assert rows[1].efficiency == pytest.approx((DRAFT + VERIFY) / (DRAFT + VERIFY + HOST))
            speeds = [(row.decode, row.gigabytes) for row in rows]
            assert speeds == [(pytest.approx(10), None), (pytest.approx(25), pytest.approx(20))]


@pytest.mark.parametrize(("runs", "flagged"), [(3, False), (4, True)])
def test_a_ratio_that_depends_on_who_comes_first_is_flagged_after_four_runs_of_each(runs, flagged):
    text, orders = [[1, 2]], ["pm"] * runs + ["mp"] * runs
    mine = TimedAnswer(["p"], "", text, 1.0, [1.0] * 2 * runs)
    other = TimedAnswer(["p"], "", text, 1.5, [2.0] * runs + [1.0] * runs)
    found = summary.faults([Turns(mine, other, orders)])
    says = "the ratio over model.generate depends on which of the two comes first, 2.00 times"
    assert found == [f"unfair: {says}"] * flagged


def test_auto_drafts_on_the_host_where_no_head_or_a_damaged_one_is_there(tmp_path):
    model, head = hf_models.build("llama"), tmp_path / "specdec_head"
    model.config._name_or_path = str(tmp_path)
    for write in (lambda: None, head.mkdir, lambda: (head / "config.json").write_text("[]")):
        write()
        assert bench_configs.drafts_on_host("auto", None, model)
    shutil.rmtree(head)
    save_head(head_for(model), head)
    assert not bench_configs.drafts_on_host("auto", None, model)


def test_drafts_of_the_host_are_time_of_the_loop_and_one_batch_has_no_interval():
    whole = DRAFT + VERIFY + HOST
    for on_host, outside in ((True, DRAFT + HOST), (False, HOST)):
        found = efficiency.predict([statistics()], curve(), drafts_on_host=on_host)
        assert found.loop_share == pytest.approx(outside / whole)
    batch = np.array([[10.0, 1.0, 10.0, 2.0]])
    assert summary.interval_of(batch) is None
    assert summary.interval_of(np.repeat(batch, 2, axis=0)) == (2, 2)


def test_the_curve_of_bare_forwards_begins_at_the_step_of_plain_decoding():
    """Whose own time is not that of a forward behind these prompts."""
    model, left_out = hf_models.tiny("llama"), {}
    plain = hf_models.decode(model, (9, 4)).stats
    drafted = hf_models.decode(model, (9, 4), drafter=hf_models.perturbed("llama")).stats
    batches = [PromptBatch(["a", "b"], "", hf_models.prompts((9, 4)))]
    costs = results._forward_costs(
        SimpleNamespace(model=model), batches, [plain, drafted], left_out, in_rounds=False
    )
    assert left_out == {}
    assert costs.at(1) == pytest.approx(efficiency.round_costs([plain]).median(1))
    assert costs.range == (1, 1 + max(drafted.gammas))
