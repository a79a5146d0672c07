"""Every function of the compat modules takes what its peer's does, and names what is wrong."""

import ast
import inspect
import os
from pathlib import Path

import pytest
import torch
from compat import sglang_loops
from compat.sglang_loops import EXAMPLE, chain, eagle_tree, example_logits, links, outputs
from transformers.generation import utils

from specdec_kernels.compat import flashinfer, sglang, tensorrt_llm, transformers

# A chain has no thresholds, and ids are named by the op that reads them.
UNREAD = {(sglang.chain_speculative_sampling_triton, f"threshold_{n}") for n in ("single", "acc")}
SAID = {"candidate_input_ids": "candidate_input_ids|draft_token_ids"}


def calls():
    """Each function with good arguments, all of them on the CPU."""
    probs, per_row = torch.full((2, 5), 0.2), torch.tensor([0.5, 0.6])
    indices, noise = torch.tensor([0, 1, 1]), {"seed": 1, "offset": 0}
    for more in ({"indices": indices}, noise):
        yield flashinfer.sampling_from_logits, {"logits": probs, **more}
        yield flashinfer.sampling_from_probs, {"probs": probs, **more}
        yield flashinfer.top_p_sampling_from_probs, {"probs": probs, "top_p": per_row, **more}
        yield flashinfer.top_k_sampling_from_probs, {"probs": probs, "top_k": 3, **more}
        yield flashinfer.min_p_sampling_from_probs, {"probs": probs, "min_p": 0.1, **more}
    joint = {"top_k": 2, "top_p": per_row, "filter_apply_order": "joint"}
    yield flashinfer.softmax, {"logits": probs, "temperature": per_row}
    yield flashinfer.top_k_top_p_sampling_from_probs, {"probs": probs, **joint}
    yield flashinfer.top_k_top_p_sampling_from_logits, {"logits": probs, **joint}
    drafts = {"draft_probs": probs[None], "draft_token_ids": torch.zeros(1, 2).int()}
    counts = {
        f"maybe_output_{name}_num": torch.zeros(1).int()
        for name in ("accepted_token", "emitted_draft_token")
    }
    rows = {"target_probs": torch.full((1, 3, 5), 0.2)}
    yield flashinfer.chain_speculative_sampling, {**drafts, **rows, **counts, **noise}
    tree, logits = outputs(2, 6, 4) | EXAMPLE, example_logits()
    yield sglang.verify_tree_greedy, {**tree, "target_predict": logits.argmax(-1)}
    yield sglang.tree_speculative_sampling_target_only, {
        **tree, "uniform_samples": torch.rand(2, 6),
        "uniform_samples_for_final_sampling": torch.rand(2), "target_probs": logits.softmax(-1),
        "draft_probs": logits * 0, "threshold_single": 1.0, "threshold_acc": 1.0,
    }  # fmt: skip
    yield (
        sglang.chain_speculative_sampling_triton,
        outputs(2, 3, 3) | chain(2, 3, 4, torch.Generator().manual_seed(0)),
    )
    parent_list, selected = eagle_tree(torch.Generator(), 2, 2, 3, 5)
    out = {"verified_seq_len": torch.tensor([3, 4]), "positions": torch.zeros(10).long()}
    out |= links(2, 5)
    masks = torch.ones(85).bool(), torch.ones(50).bool(), torch.ones(10).byte()
    for mode, mask in enumerate(masks):
        yield sglang.build_tree_kernel_efficient, {
            "parent_list": parent_list, "selected_index": selected, "tree_mask": mask, **out,
            "topk": 2, "depth": 3, "draft_token_num": 5, "tree_mask_mode": mode,
        }  # fmt: skip
    of_mask = {"tree_mask": masks[1], **out, "batch_size": 2, "draft_token_num": 5}
    yield sglang.reconstruct_indices_from_tree_mask, of_mask
    for weight in (None, 0.5):
        yield transformers._speculative_sampling, {
            "candidate_input_ids": torch.tensor([[3, 1]]),
            "candidate_logits": torch.zeros(1, 2, 5), "candidate_length": 2,
            "new_logits": torch.zeros(1, 3, 5), "assistant_ensemble_weight": weight,
        }  # fmt: skip
    names = ("draft_ids", "target_ids", "context_lengths", "nums_draft_tokens", "sequence_lengths")
    numbers = ([[7, 8]], [[1, 7, 6]], [1], [2], [3])
    yield tensorrt_llm.accept_draft_tokens_by_ids, {
        **{n: torch.tensor(x).int() for n, x in zip(names, numbers, strict=True)},
        "finished": torch.zeros(3, 1).byte(), "finished_final": torch.zeros(1).byte(),
        "finished_sum": torch.zeros(1).int(), "batch_slots": torch.zeros(1).int(),
    }  # fmt: skip


def wrong(name, value):
    """(value, error) of what no argument like this one may be."""
    if isinstance(value, torch.Tensor):
        yield [0], TypeError
        of_any_length = name in ("indices", "batch_slots")
        yield value[None] if of_any_length else value.flatten()[:-1], (RuntimeError, ValueError)
        if not value.is_floating_point():  # rows of any type are read
            yield value.half(), RuntimeError
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from (("x", TypeError), (1j, TypeError), (True, TypeError))


@pytest.mark.parametrize("number", range(len([*calls()])))
def test_an_argument_of_a_wrong_type_or_shape_is_named(number):
    function, good = [*calls()][number]
    function(**good)
    for name, value in good.items():
        packed = name == "tree_mask" and good.get("tree_mask_mode") == 2  # read as bytes
        if packed or (function, name) in UNREAD:
            continue
        for given, error in wrong(name, value):
            with pytest.raises(error, match=SAID.get(name, name)):
                print(name, given, function(**{**[*calls()][number][1], name: given}))


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float32), ("cpu", torch.float64)])
def test_no_function_depends_on_the_default_device_or_dtype(device, dtype):
    prepared = list(calls())
    try:
        torch.set_default_device(device)
        torch.set_default_dtype(dtype)
        results = [function(**arguments) for function, arguments in prepared]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    for result in results:
        for t in result if isinstance(result, tuple) else (result,):
            assert t is None or t.device.type == "cpu"
            assert t is None or t.dtype != torch.float64


# The peers' own signatures.

OPS = "sglang.kernels.ops.speculative"
TREE = "candidates retrive_index retrive_next_token retrive_next_sibling"
CHAIN = (
    f"predicts accept_index accept_token_num {TREE} uniform_samples "
    "uniform_samples_for_final_sampling target_probs draft_probs threshold_single threshold_acc "
    "deterministic"
)
# Of SGLang 0.5.23: function -> the module that defines it, and its arguments.
OF_SGLANG = {
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


@pytest.mark.parametrize("name", OF_SGLANG)
def test_the_arguments_are_those_of_sglang(name):
    """By the table and, where SGLang's files are at hand, by these."""
    module, arguments = OF_SGLANG[name]
    got = " ".join(inspect.signature(getattr(sglang, name)).parameters)
    assert got == arguments.replace("retrive_", "retrieve_")
    if sglang_loops.source() is not None:
        assert sglang_loops.arguments(module, name) == arguments


NOISE = "seed=None offset=None"
ROW = "indices=None deterministic=True generator=None check_nan=False"
BOTH = (
    "top_k top_p indices=None filter_apply_order='top_k_first' deterministic=True generator=None "
    f"check_nan=False {NOISE}"
)
# Of FlashInfer 0.7.4: function -> its arguments.
OF_FLASHINFER = {
    "softmax": "logits temperature=None enable_pdl=None",
    "sampling_from_logits": f"logits {ROW} {NOISE}",
    "sampling_from_probs": f"probs {ROW} {NOISE} return_valid=False",
    "top_p_sampling_from_probs": f"probs top_p {ROW} {NOISE} return_valid=False",
    "top_k_sampling_from_probs": f"probs top_k {ROW} {NOISE} return_valid=False",
    "min_p_sampling_from_probs": f"probs min_p {ROW} {NOISE} return_valid=False",
    "top_k_top_p_sampling_from_logits": f"logits {BOTH} top_k_max=None",
    "top_k_top_p_sampling_from_probs": f"probs {BOTH} return_valid=False top_k_max=None",
    "chain_speculative_sampling": (
        "draft_probs draft_token_ids target_probs maybe_output_accepted_token_num=None "
        f"maybe_output_emitted_draft_token_num=None deterministic=True generator=None {NOISE}"
    ),
}


def arguments_in(path, function):
    """The arguments of a function that a file defines, with their defaults."""
    found = (n for n in ast.parse(path.read_text()).body if getattr(n, "name", None) == function)
    a = next(found).args
    required = [None] * (len(a.args) - len(a.defaults))
    pairs = zip(a.args, [*required, *a.defaults], strict=True)
    return " ".join(x.arg if d is None else f"{x.arg}={ast.unparse(d)}" for x, d in pairs)


@pytest.mark.parametrize("name", OF_FLASHINFER)
def test_the_arguments_are_those_of_flashinfer(name):
    """By the table and, where `FLASHINFER_SOURCE` names a folder with its files, by these."""
    assert arguments_in(Path(flashinfer.__file__), name) == OF_FLASHINFER[name]
    if folder := os.environ.get("FLASHINFER_SOURCE"):
        path = Path(folder) / "flashinfer" / "sampling.py"
        assert arguments_in(path, name) == OF_FLASHINFER[name]


def test_every_function_of_flashinfer_is_compared():
    own = [n for n, f in vars(flashinfer).items() if inspect.isfunction(f)]
    defined = [n for n in own if getattr(flashinfer, n).__module__ == flashinfer.__name__]
    assert {n for n in defined if n[0] != "_"} == OF_FLASHINFER.keys()


def test_the_arguments_are_those_of_transformers():
    want, got = (
        inspect.signature(of._speculative_sampling).parameters for of in (utils, transformers)
    )
    assert [(n, p.default) for n, p in got.items()] == [(n, p.default) for n, p in want.items()]
