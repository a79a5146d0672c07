"""The programs of docs/vocabulary-parallel.md and examples/tensor_parallel.py run as printed."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from sharded.on_ranks import run_program
from support.programs import output_of

from specdec_kernels import sample, verify_chain

ROOT = Path(__file__).parents[2]

PAGE = ROOT / "docs" / "vocabulary-parallel.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not here")


def test_the_printed_program_gives_the_verdict_of_the_whole_rows(ranks):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    logits = torch.randn(4, 6, 32000, generator=torch.Generator().manual_seed(0))
    steps = torch.arange(4)
    want = verify_chain(
        logits, logits[:, :5].argmax(-1), temperature=0.8, top_p=0.9, seeds=steps, positions=steps
    )
    printed = ranks.run(4, run_program, program)
    assert printed == [f"{rank} {want.tokens.tolist()}\n" for rank in range(4)]


def torchrun(script):
    """What two processes print, in any order."""
    return output_of(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script),
        timeout=240,
        OMP_NUM_THREADS="1",
    )


@pytest.mark.full  # two processes that import everything
def test_a_tensor_parallel_model_gives_the_text_of_plain_sampling(tmp_path):
    """Rule match gives the tokens that `sample` draws from the model's logits, one by one."""
    example = ROOT / "examples" / "tensor_parallel.py"
    printed = sorted(torchrun(example).splitlines())
    tiny = runpy.run_path(str(example))
    model = tiny["LlamaForCausalLM"].from_pretrained(tiny["tiny_llama"](tmp_path))
    text = torch.tensor([[5, 17, 31, 8, 5, 17, 31]])
    for _ in range(tiny["NEW_TOKENS"]):
        with torch.no_grad():
            logits = model(input_ids=text).logits[:, -1]
        drawn = sample(
            logits, temperature=0.7, top_k=20, noise="shared", seeds=torch.tensor([1]),
            positions=torch.tensor([text.shape[1]]),
        )  # fmt: skip
        text = torch.cat([text, drawn.tokens[:, None]], 1)
    rounds = int(re.search(r"(\d+) rounds", printed[0])[1])
    assert rounds < tiny["NEW_TOKENS"]
    assert printed == [
        f"rank {rank}: {columns} columns, {rounds} rounds: {text[0].tolist()}"
        for rank, columns in ((0, 49), (1, 48))
    ]
