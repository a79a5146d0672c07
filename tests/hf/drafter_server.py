"""The other process of the tests of remote drafters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from specdec_hf import Drafter, ModelDrafter, RemoteDrafter, serve_drafter
from specdec_hf.drafters import remote
from support import drafter_proof, hf_models
from support.drafter_proof import target, with_wrong_distribution


def served_here(drafter: Drafter, monkeypatch: Any) -> RemoteDrafter:
    """A remote drafter whose server is this process."""
    server = remote._Server(drafter)
    monkeypatch.setattr(
        RemoteDrafter, "_ask", lambda self, what, value: getattr(server, what)(value)
    )
    monkeypatch.setattr(remote, "_check_initialized", lambda name: None)
    monkeypatch.setattr(remote.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(remote.dist, "get_rank", lambda: 0)
    return RemoteDrafter(1)


def serve(store: str) -> None:
    """Serve three draft models, the last of them with a wrong distribution."""
    small = drafter_proof.draft_model(target()[0])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=1, world_size=2)
    serve_drafter(hf_models.perturbed("llama"))
    for drafter in (small, with_wrong_distribution(ModelDrafter(small))):
        serve_drafter(drafter)
    dist.destroy_process_group()
