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
from compat.sglang_loops import expected
from proofs import SIGNIFICANCE, chi_square

pytest.importorskip("sglang", reason="`make more TASK=test-sglang` installs SGLang")

PAGE = Path(__file__).parents[2] / "docs/sglang.md"
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


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """What the page's program prints, and what it answers to `ASK`."""
    folder = tmp_path_factory.mktemp("engine")
    block = next(b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
                 if "Engine" in b)  # fmt: skip
    for before, after in (
        ('"HuggingFaceTB/SmolLM2-135M-Instruct"', repr(MODEL)),
        ('"intel_amx"', '"torch_native", skip_server_warmup=True, log_level="info"'),
        ("    engine.shutdown()", ASK.replace("PAIRS", str(PAIRS)) + "    engine.shutdown()"),
    ):
        assert before in block
        block = block.replace(before, after)
    (folder / "program.py").write_text(block)
    path = os.pathsep.join([*filter(None, sys.path), str(STANDIN)])
    given = {"SPECDEC_SGLANG": "1", "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(
        [sys.executable, str(folder / "program.py")], env=os.environ | given, cwd=folder,
        capture_output=True, text=True, check=False, timeout=1100,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    assert "specdec_sglang verifies the drafts of sampled requests" in said
    (asked,) = re.findall(r"^ASKED (.*)$", said, re.MULTILINE)
    return json.loads(asked)


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def test_greedy_texts_are_those_of_the_model_and_sampled_ones_differ(served, model):
    ids = torch.tensor([served["ids"]])
    want = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert served["greedy"] == 2 * [want[0, ids.shape[1] :].tolist()]
    assert len({*map(tuple, served["sampled"])}) == 6


def test_pairs_of_tokens_follow_the_model(served, model):
    def p_value(temperature):
        given, found = dict(temperatures=temperature, top_ks=3), {}
        with torch.no_grad():
            first = expected(model(torch.tensor([served["ids"]])).logits[0, -1], **given)
            for x in first.nonzero()[:, 0].tolist():
                logits = model(torch.tensor([[*served["ids"], x]])).logits[0, -1]
                second = expected(logits, **given)
                found |= {(x, y): first[x] * second[y] for y in second.nonzero()[:, 0].tolist()}
        names = list(found)
        seen = torch.tensor([names.index(tuple(pair)) for pair in served["pairs"]])
        return chi_square(seen, torch.stack([*found.values()]).double())

    assert p_value(1.3) > SIGNIFICANCE
    assert p_value(0.4) < SIGNIFICANCE, "the control"
