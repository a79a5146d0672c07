"""Texts of several rounds by vLLM's V2 classes, against the probabilities of all texts.

vLLM draws the drafts. Where its noise follows from their position alone, the next round meets the
noise of rejected drafts again, by which rule block has decided: the bias that the plug-in refuses.
"""

import json

import pytest
import torch
from proofs import SIGNIFICANCE, chi_square, filtered_distribution, joint_distribution
from support.programs import output_of
from vllm_plugin import vllm_engine, vllm_v2

pytest.importorskip("vllm", reason="`make more TASK=test-vllm` installs vLLM")
pytest.importorskip("triton", reason="the V2 runner is made of Triton kernels")
pytestmark = pytest.mark.timeout(580)

CASES = [
    ("token", "position"), ("match", "position"), ("block", "position"),
    ("token", "round"), ("match", "round"), ("block", "round"),
]  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds")
    job, results = folder / "job.json", folder / "results.json"
    job.write_text(json.dumps(CASES))
    output_of(
        "-m", "vllm_plugin.vllm_v2_rounds", job, results, timeout=540,
        **vllm_engine.ENVIRONMENT, **vllm_v2.ENVIRONMENT,
    )  # fmt: skip
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def probabilities():
    """Of each text of LENGTH tokens after token 0, whose digits in base V are its number."""
    from vllm_plugin.vllm_v2_rounds import LENGTH  # noqa: PLC0415
