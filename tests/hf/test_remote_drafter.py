"""A drafter in another rank of a process group."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hf.drafter_server import serve, served_here
from specdec_hf import ModelDrafter, PromptLookupDrafter, RemoteDrafter, TrieTree, generate
from support import hf_models
from support.drafter_proof import SIGNIFICANCE, assert_greedy_identical, joint_p_value


@pytest.fixture
def server(tmp_path):
    """Rank 1 in a process of its own, and this process as rank 0."""
    store = str(tmp_path / "store")
    process = mp.get_context("spawn").Process(target=serve, args=(store,))
    process.start()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2)
    yield process
    dist.destroy_process_group()
    if process.is_alive():
        process.kill()
    process.join()


@pytest.mark.full  # it starts processes
@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")
def test_a_drafter_of_another_rank_loses_nothing(server):
    drafter, model = RemoteDrafter(1), hf_models.tiny("llama")
    assert assert_greedy_identical(lambda: drafter, model).accepted > 0
    sampled = {"max_new_tokens": 16, "do_sample": True, "seed": 4, "guard": False}
    inputs = hf_models.prompts((9, 4, 12))
    near = hf_models.perturbed("llama")
    here = generate(model, **inputs, **sampled, rule="block", drafter=near)
    assert torch.equal(here, generate(model, **inputs, **sampled, rule="block", drafter=drafter))
    # Each drafter of a tree has noise of its own.
    sampled |= {"tree": TrieTree(depth=3), "rule": "multi_draft"}
    first = hf_models.build("llama", 1)
    here = generate(model, **inputs, **sampled, drafter=[first, near])
    there = generate(model, **inputs, **sampled, drafter=[ModelDrafter(first), drafter])
    assert torch.equal(here, there)
    drafter.close()
    drafter = RemoteDrafter(1)
    assert joint_p_value(drafter, "block", texts=1500) > SIGNIFICANCE
    drafter.close()
    wrong = RemoteDrafter(1)
    assert joint_p_value(wrong, "token", texts=900) < SIGNIFICANCE, "negative control"
    wrong.close()
    server.join(30)
    assert server.exitcode == 0


def test_a_served_drafter_drafts_as_it_does_here(monkeypatch):
    near = hf_models.perturbed("llama")
    served = served_here(ModelDrafter(near), monkeypatch)
    for seed in (0, 0, 1):
        model = hf_models.tiny("llama", seed)
        there, here = (hf_models.decode(model, (9, 4), drafter=one) for one in (served, near))
        assert hf_models.outcome(there) == hf_models.outcome(here)


class Remembers(PromptLookupDrafter):
    """Keeps the target that each call shows it."""

    def start(self, context):
        self.targets = [*getattr(self, "targets", ()), context.model]
        super().start(context)


def test_a_served_drafter_sees_one_target_in_calls_of_the_same_model(monkeypatch):
    remembers = Remembers()
    served = served_here(remembers, monkeypatch)
    for model in (hf_models.tiny("llama"), hf_models.tiny("llama"), hf_models.tiny("gpt2")):
        hf_models.decode(model, (9,), drafter=served)
    first, second, other = remembers.targets
    assert first is second is not other
