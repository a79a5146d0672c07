"""The functions of compat.sglang against SGLang's own files, where they are at hand.

Without them a table stands for their arguments. SGLang's kernel of chains runs in Triton's
interpreter, because it is the only one that is written in Triton and imports nothing else.
"""

import importlib.util
import inspect
import os
from pathlib import Path

import pytest
import torch
from support import sglang_source
from support.sglang_loops import chain, outputs

from specdec_kernels.compat import sglang

os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is decorated

OPS = "sglang.kernels.ops.speculative"
TREE = "candidates retrive_index retrive_next_token retrive_next_sibling"
CHAIN = (
    f"predicts accept_index accept_token_num {TREE} uniform_samples "
    "uniform_samples_for_final_sampling target_probs draft_probs threshold_single threshold_acc "
    "deterministic"
)
# Of SGLang 0.5.23: function -> the module that defines it, and its arguments.
TABLE = {
    "tree_speculative_sampling_target_only": (f"{OPS}.sampling", CHAIN),
    "chain_speculative_sampling_triton": (f"{OPS}.reject_sampling", f"{CHAIN} block_verification"),
    "verify_tree_greedy": (
        f"{OPS}.tree", f"predicts accept_index accept_token_num {TREE} target_predict",
    ),
    "build_tree_kernel_efficient": (
        f"{OPS}.tree",
        "parent_list selected_index verified_seq_len tree_mask positions retrive_index "
        "retrive_next_token retrive_next_sibling topk depth draft_token_num tree_mask_mode",
    ),
    "reconstruct_indices_from_tree_mask": (
        f"{OPS}.tree",
        "tree_mask verified_seq_len positions retrive_index retrive_next_token "
        "retrive_next_sibling batch_size draft_token_num",
    ),
}  # fmt: skip
needs_source = pytest.mark.skipif(
    sglang_source.source() is None,
    reason="SGLang is not installed, and SGLANG_SOURCE names no folder with its files",
)


@pytest.mark.parametrize("name", TABLE)
def test_the_arguments_are_those_of_the_table(name):
    got = " ".join(inspect.signature(getattr(sglang, name)).parameters)
    assert got == TABLE[name][1].replace("retrive_", "retrieve_")


@needs_source
@pytest.mark.parametrize("name", TABLE)
def test_the_table_is_that_of_the_files(name):
    module, arguments = TABLE[name]
    assert sglang_source.arguments(module, name) == arguments


@needs_source
def test_every_call_in_its_files_passes_what_the_functions_take():
    """`_func` is the spelling of the functions that choose a platform."""
    wrapped = {"build_tree_kernel_efficient", "eagle_sample"}  # eagle_utils has its own of the name
    found = [call for call in sglang_source.calls(TABLE) if call[1] not in wrapped]
    for file, name, keywords, positional in found:
        takes = inspect.signature(getattr(sglang, name)).parameters
        spelled = {k.replace("retrive_", "retrieve_") for k in keywords} - {"topk"}
        assert spelled <= takes.keys(), (file, name)
        assert positional + len(spelled) <= len(takes), (file, name)
    assert {(file, name) for file, name, *_ in found} >= {
        ("dflash_utils.py", "tree_speculative_sampling_target_only"),
        ("uno_utils.py", "chain_speculative_sampling_triton"),
        ("ngram_worker.py", "reconstruct_indices_from_tree_mask"),
        ("eagle_utils.py", "verify_tree_greedy"),
    }


def test_the_search_for_arguments_reads_all_kinds(tmp_path, monkeypatch):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/version.py").write_text("def f(a, /, b, *, c=1): pass\n")
    monkeypatch.setenv("SGLANG_SOURCE", str(tmp_path))
    assert sglang_source.arguments("sglang.version", "f") == "a b c"
    assert sglang_source.arguments("sglang.version", "g") == "nothing"
    monkeypatch.setenv("SGLANG_SOURCE", str(tmp_path / "sglang"))
    with pytest.raises(FileNotFoundError, match="must name a folder with sglang/, got"):
        sglang_source.source()


@pytest.fixture(scope="module")
def kernel():
    """SGLang's `chain_speculative_sampling_triton`, interpreted."""
    pytest.importorskip("triton")
    path = Path(sglang_source.path_of(TABLE["chain_speculative_sampling_triton"][0]))
    spec = importlib.util.spec_from_file_location("reject_sampling_of_sglang", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.chain_speculative_sampling_triton


@needs_source
@pytest.mark.triton
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_chain_is_decided_as_by_its_kernel(kernel, n, block):
    """Every output is equal; with other uniforms they are not."""
    b, v = 16, 13
    given = chain(b, n, v, torch.Generator().manual_seed(10 * n + block))
    spelled = {k.replace("retrieve_", "retrive_"): x for k, x in given.items()}
    want, got, other = (outputs(b, n, n) for _ in range(3))
    kernel(**want, **spelled, block_verification=block)
    sglang.chain_speculative_sampling_triton(**got, **spelled, block_verification=block)
    assert {k: t.tolist() for k, t in got.items()} == {k: t.tolist() for k, t in want.items()}
    spelled["uniform_samples_for_final_sampling"] = given["uniform_samples"][:, 0].contiguous()
    sglang.chain_speculative_sampling_triton(**other, **spelled, block_verification=block)
    assert other["predicts"].tolist() != want["predicts"].tolist()
