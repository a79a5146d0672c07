"""SGLang's engine with n-gram drafts, as the program of docs/sglang.md starts it.

PyTorch stands in for SGLang's kernels for CPUs; see `standin`.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.providers import SIGNIFICANCE, chi_square
from support.sglang_steps import expected
from support.sources import ROOT

pytest.importorskip("sglang", reason="`make more TASK=test-sglang` installs SGLang")

PAGE = ROOT / "docs" / "sglang.md"
MODEL = os.environ.get("SPECDEC_TEST_MODEL")
STANDIN = Path(__file__).parent / "standin"
PROMPT = "One two three four one two three four one two"
# After the page's engine has been made: texts with and without sampling, and pairs of tokens.
ASK = """
    ids = engine.tokenizer_manager.tokenizer(prompts[0])["input_ids"]

    def ask(number, tokens, **given):
        given = dict(temperature=0.0, max_new_tokens=tokens, ignore_eos=True) | given
        out = engine.generate(input_ids=[ids] * number, sampling_params=given)
        return [one["output_ids"][:tokens] for one in out]

    import json
    print("ASKED", json.dumps(dict(
        greedy=ask(2, 24), sampled=ask(6, 24, temperature=0.9), ids=ids,
        pairs=ask(PAIRS, 2, temperature=1.3, top_k=3),
    )), flush=True)
"""
PAIRS = 200

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not MODEL, reason="SPECDEC_TEST_MODEL names no model folder"),
]


def served(tmp_path, enabled):
    """What the page's program prints, and what it answers to `ASK`."""
    block = next(b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
                 if "Engine" in b)  # fmt: skip
    for before, after in (
        ('"HuggingFaceTB/SmolLM2-135M-Instruct"', repr(MODEL)),
        ('"intel_amx"', '"torch_native", skip_server_warmup=True, log_level="info"'),
        ("    engine.shutdown()", ASK.replace("PAIRS", str(PAIRS)) + "    engine.shutdown()"),
    ):
        assert before in block
        block = block.replace(before, after)
    program = tmp_path / "program.py"
    program.write_text(block)
    path = os.pathsep.join([*filter(None, sys.path), str(STANDIN)])
    done = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ
        | {"SPECDEC_SGLANG": enabled, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
        cwd=tmp_path,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    (asked,) = re.findall(r"^ASKED (.*)$", said, re.MULTILINE)
    return json.loads(asked), said


@pytest.fixture(scope="module")
def with_plugin(tmp_path_factory):
    return served(tmp_path_factory.mktemp("with"), "1")


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    return served(tmp_path_factory.mktemp("without"), "0")


@pytest.fixture(scope="module")
def pairs(with_plugin):
    """P of the pairs of tokens that may follow the prompt, by Transformers."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    given = dict(temperatures=1.3, top_ks=3)
    ids = with_plugin[0]["ids"]
    with torch.no_grad():
        first = expected(model(torch.tensor([ids])).logits[0, -1], **given)
        out = {}
        for x in first.nonzero()[:, 0].tolist():
            second = expected(model(torch.tensor([[*ids, x]])).logits[0, -1], **given)
            out |= {(x, y): float(first[x] * second[y]) for y in second.nonzero()[:, 0].tolist()}
    return out


def p_value(found, pairs):
    names = list(pairs)
    assert {*map(tuple, found)} <= {*names}
    return chi_square(
        torch.tensor([names.index(tuple(pair)) for pair in found]),
        torch.tensor(list(pairs.values()), dtype=torch.float64),
    )


def test_the_plugin_says_that_it_verifies(with_plugin, without):
    line = "specdec_sglang verifies the drafts of sampled requests"
    assert line in with_plugin[1]
    assert line not in without[1]


def test_greedy_text_is_that_of_sglang(with_plugin, without):
    first, second = with_plugin[0]["greedy"]
    assert first == second == without[0]["greedy"][0]


def test_sampled_texts_differ_and_without_the_plugin_they_are_greedy(with_plugin, without):
    """The first token comes from the prompt's step, which has no drafts."""
    assert len({*map(tuple, with_plugin[0]["sampled"])}) == 6
    texts = without[0]["sampled"]
    by_first = {text[0]: text for text in texts}
    assert all(text == by_first[text[0]] for text in texts)


def test_pairs_of_tokens_follow_the_model_and_without_the_plugin_they_do_not(
    with_plugin, without, pairs
):
    assert p_value(with_plugin[0]["pairs"], pairs) > SIGNIFICANCE
    assert p_value(without[0]["pairs"], pairs) < SIGNIFICANCE
