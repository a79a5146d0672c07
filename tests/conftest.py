"""Environment of every test run, and the markers by which `make quick` leaves tests out."""

import atexit
import functools
import gc
import os
from collections import Counter

if "PYTEST_XDIST_WORKER" in os.environ:
    # To free every object of a run takes a process ten seconds. What is registered first runs last.
    atexit.register(os._exit, 0)

# Triton decides at import whether kernels are interpreted; every test of them needs that here.
os.environ.setdefault("TRITON_INTERPRET", "1")
# OpenMP threads that spin while they wait take the processor from the tests beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from pathlib import Path

import pytest
import torch
from support import shared_build

# Threads of one process would wait for the processors that the tests of another use.
torch.set_num_threads(
    max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
)

TESTS = Path(__file__).parent
# Provider in a test's parameters -> marker. "cuda" is the CUDA source, compiled for the CPU.
PROVIDERS = {"cuda": "simt", "triton": "triton"}
# Files that `make quick` leaves out: they enumerate trees, run programs, build the package, train
# heads, stand in for CUDA graphs, or decode with caches and models of other kinds.
SLOW_FILES = {
    "analysis/test_tree_acceptance.py",
    "hf/test_beams.py",
    "hf/test_cli.py",
    "hf/test_cli_analyze.py",
    "hf/test_cli_failures.py",
    "hf/test_cli_process.py",
    "hf/test_cuda_graphs.py",
    "hf/test_encoder_decoder.py",
    "hf/test_head_step.py",
    "hf/test_head_training.py",
    "hf/test_parallel_heads.py",
    "hf/test_pass_head.py",
    "hf/test_state_cache.py",
    "hf/test_step_graphs.py",
    "hf/test_tree_calls.py",
    "hf/test_trees.py",
    "project/test_package.py",
    "project/test_providers.py",
    "row/test_capability.py",
    "tree/test_tree_distribution.py",
    "tree/test_tree_negative_controls.py",
}
SLOW_ROOMS = {"benchmarks", "device", "sharded"}
# The slowest single tests of the other files, by measurement.
SLOW_TESTS = {
    "test_a_forward_that_raises_hands_over_to_the_model",
    "test_a_second_call_compiles_nothing",
    "test_a_text_that_depends_on_more_than_its_seed_has_a_note[budget-rest of the batch]",
    "test_arguments_of_assisted_generation_choose_the_drafter[generate]",
    "test_greedy_equals_plain_generation_merged_with_prompt_lookup",
    "test_in_a_tree_the_drafts_are_verified_by_the_whole_model",
    "test_in_a_tree_with_others_the_text_is_that_of_plain_generation",
    "test_no_layer_sees_a_token_twice[llama-True]",
    "test_optimal_chooses_the_depth_of_trees",
    "test_the_printed_drafters_run",
    "test_the_statistics_say_whether_the_rule_is_lossless",
    "test_the_threshold_of_transformers_is_honoured",
    "test_tokens_of_the_loop_are_those_of_the_formula",
    "test_importing_the_ops_loads_no_transformers",
    "test_case_names_are_unique_and_a_case_gives_the_same_arguments_again",
    "test_rule_token_decides_as_exact_arithmetic_does_ties_included[reference]",
    "test_siblings_of_two_parents_and_two_distributions_are_kept_apart[reference]",
    "test_the_token_is_the_inverse_cdf_of_the_uniform_of_its_noise_stream[draft-reference]",
    "test_the_token_is_the_inverse_cdf_of_the_uniform_of_its_noise_stream[residual-reference]",
    "test_a_row_sees_its_ancestors_and_the_prefix[reference-B2-N300-S517-int32-random-w0-dense]",
    "test_a_row_sees_its_ancestors_and_the_prefix[cpp-B2-N300-S517-int32-random-w0-dense]",
}
# Tests with many cases of each kind -> n, of which `make quick` runs every n-th. The numbers have
# no factor in common with those of the last parameters, so that each of these occurs.
EVERY = {
    "chain/test_contract.py::test_inputs_are_not_changed_and_a_second_call_gives_the_same": 3,
    "chain/test_invariance.py::test_the_number_of_threads_changes_no_bit": 3,
    "chain/test_limits.py::test_up_to_max_new_tokens_the_distribution_is_the_targets": 4,
    "chain/test_limits.py::test_up_to_the_first_end_of_sequence_the_distribution_is_the_targets": 3,
    "chain/test_negative_controls.py::test_the_enumeration_rejects_a_block_verifier_with": 4,
    "chain/test_rule_faults.py::test_a_draft_id_out_of_range_is_never_an_index": 5,
    "chain/test_rule_faults.py::test_ids_stay_in_the_vocabulary_for_data_of_every_kind": 5,
    "chain/test_rules.py::test_block_accepts_at_least_as_many_drafts_as_token": 4,
    "chain/test_rules.py::test_emitted_tokens_have_the_targets_distribution": 3,
    "chain/test_rules.py::test_lenient_has_the_distribution_of_its_formula": 4,
    "hf/test_cache.py::test_a_window_is_masked_where_it_ends_or_the_self_check_passed_its_end": 3,
    "hf/test_cache.py::test_a_wrong_rollback_is_detected": 3,
    "hf/test_candidate_generators.py::test_greedy_equals_plain_generation": 2,
    "hf/test_cascades.py::test_greedy_equals_plain_generation": 3,
    "hf/test_cascades.py::test_match_equals_plain_sampling": 3,
    "hf/test_custom_drafters.py::test_a_draft_that_cannot_be_accepted_leaves_a_note": 3,
    "hf/test_custom_drafters.py::test_a_drafter_cannot_write_to_the_history": 5,
    "hf/test_custom_drafters.py::test_an_exception_frees_the_drafter": 5,
    "hf/test_custom_drafters.py::test_tokens_may_be_a_tensor_an_array_or_lists": 3,
    "hf/test_custom_generate.py::test_an_argument_changes_the_text_as_in_plain_generation": 3,
    "hf/test_custom_generate.py::test_stop_strings_end_the_text_as_in_plain_generation": 5,
    "hf/test_default_drafter.py::test_calls_that_refuse_trees_get_chains": 3,
    "hf/test_encoder_decoder_refusals.py::"
    "test_a_wrong_roll_back_is_found_by_the_check_and_changes_the_text": 3,
    "hf/test_every_drafter.py::test_a_sequence_does_not_depend_on_its_batch_or_an_earlier_call": 11,
    "hf/test_every_drafter.py::test_greedy_text_is_that_of_plain_generation": 5,
    "hf/test_fixed_width.py::test_the_text_is_that_without_speculation": 5,
    "hf/test_generate.py::test_a_sequence_that_a_criterion_ended_goes_on_with_padding": 3,
    "hf/test_generate.py::test_end_of_sequence_inside_a_draft_ends_the_text": 3,
    "hf/test_generate.py::test_greedy_equals_model_generate": 3,
    "hf/test_generate.py::test_malformed_drafts_change_nothing": 3,
    "hf/test_generate.py::test_match_equals_plain_sampling": 5,
    "hf/test_generation_config.py::test_a_processor_that_knows_its_batch_is_taken_apart": 3,
    "hf/test_head_formats.py::test_a_published_head_drafts_and_text_stays_as_it_is": 5,
    "hf/test_heads.py::test_angles_that_depend_on_the_longest_text_are_those_of_the_text": 2,
    "hf/test_hf_arguments.py::test_custom_generate_equals_generate": 3,
    "hf/test_lookahead.py::test_ngrams_in_a_merged_tree_are_those_that_plain_forwards_give": 5,
    "hf/test_model_classes.py::test_assisted_decoding_matches_greedy_search": 3,
    "hf/test_model_inputs.py::test_a_mask_with_padding_anywhere_equals_plain_generation": 3,
    "hf/test_model_inputs.py::test_inputs_embeds_equal_plain_generation": 3,
    "hf/test_optimal.py::test_a_call_never_loses_more_than_three_percent": 7,
    "hf/test_optimal.py::test_the_speed_is_close_to_the_best_constant_length": 5,
    "hf/test_own_layers.py::test_greedy_equals_plain_generation": 3,
    "hf/test_processors.py::test_a_grammar_never_sees_a_forbidden_prefix": 3,
    "hf/test_schedule_calls.py::"
    "test_drafts_that_are_made_at_once_are_cut_where_stepping_ends_them": 7,
    "hf/test_schedule_calls.py::test_greedy_text_is_that_of_plain_generation": 5,
    "hf/test_schedule_calls.py::test_rule_match_gives_the_text_of_plain_sampling": 4,
    "hf/test_schedule_calls.py::test_seeds_repeat_the_text_alone_and_in_a_batch": 5,
    "hf/test_schedule_distribution.py::test_ending_a_draft_keeps_the_targets_distribution": 3,
    "hf/test_schedule_distribution.py::"
    "test_so_does_ending_it_by_a_confidence_that_depends_on_the_draw": 3,
    "hf/test_self_check.py::test_a_model_that_does_not_fit_the_spec_cache_gives_its_own_text": 5,
    "hf/test_self_check.py::"
    "test_a_model_that_keeps_a_state_decodes_without_drafts_and_refuses_them": 3,
    "hf/test_text_drafter.py::test_greedy_equals_plain_generation": 3,
    "hf/test_token_outputs.py::test_a_sequence_that_ended_goes_on_with_padding": 2,
    "hf/test_token_outputs.py::test_greedy_outputs_equal_those_of_model_generate": 3,
    "hf/test_tracing.py::test_tracing_changes_no_text": 2,
    "host/test_torch_equality.py::test_the_number_of_threads_changes_no_bit": 3,
    "kv/test_append_truncate.py::test_append_leaves_the_bytes_of_the_reference": 3,
    "kv/test_append_truncate.py::test_truncate_leaves_the_bytes_of_the_reference": 3,
    "kv/test_moves.py::test_leaves_the_bytes_of_the_reference": 5,
    "project/test_torch_defaults.py::test_the_text_does_not_depend_on_them": 5,
    "tree/test_verify_tree.py::test_a_chain_gives_the_bits_of_verify_chain": 3,
}
# Beside llama and t5, which `make quick` runs.
TOY_MODELS = {"gpt2", "qwen2", "qwen3", "gemma2", "bart", "whisper"}


def pytest_configure(config):
    shared_build.provide_folder(config)


@pytest.fixture(autouse=True)
def _global_state():
    """Seed the default generator; restore thread count and determinism, which tests may change."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@functools.cache
def _place(path):
    """The path of a test below this folder, or None where it is elsewhere."""
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else None


def _markers(item):
    """Markers that follow from where a test is, its parameters and its fixtures."""
    path = _place(item.path)
    room, file = path.split("/")[0], path.split("/")[-1]
    if room in SLOW_ROOMS or path in SLOW_FILES or item.name in SLOW_TESTS:
        yield "slow"
    if room == "simt":
        yield "simt"
    if file.startswith("test_triton"):
        yield "triton"
    if "smollm" in item.fixturenames:
        yield "model"
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for value in parameters.values():
        if isinstance(value, str) and value in PROVIDERS:
            yield PROVIDERS[value]
        if isinstance(value, str) and value in TOY_MODELS:
            yield "slow"
        if getattr(value, "heavy", False):
            yield "slow"


def pytest_ignore_collect(collection_path, config):
    """`make quick` runs nothing of these rooms, whose modules take seconds to import."""
    left_out = config.option.markexpr
    rooms = SLOW_ROOMS if "not slow" in left_out else set()
    rooms = rooms | {"simt"} if "not simt" in left_out else rooms
    return True if collection_path.parent == TESTS and collection_path.name in rooms else None


@pytest.hookimpl(tryfirst=True)  # before pytest reads the markers for -m
def pytest_collection_modifyitems(items):
    seen = Counter()
    for item in sorted(items, key=lambda item: item.nodeid):  # the given order may be random
        if _place(item.path):
            markers = set(_markers(item))
            test = f"{_place(item.path)}::{item.originalname}"
            if not markers and test in EVERY:
                seen[test] += 1
                if seen[test] % EVERY[test] != 1:
                    markers.add("slow")
            for marker in sorted(markers):
                item.add_marker(marker)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """To search for garbage takes seconds here, and finds none: what is loaded stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # so that libraries find nothing leaked at the end
