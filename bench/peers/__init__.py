"""The implementations that are compared, one file each. A peer is imported only where it is
installed; nothing of it is kept here."""

from __future__ import annotations

from bench.peers import compiled, eager_rule, flashinfer_chain, hf, ours, vllm_v1, vllm_v2
from bench.peers.base import Peer, Unsupported

MODULES = (ours, eager_rule, compiled, hf, vllm_v1, vllm_v2, flashinfer_chain)
PEERS: tuple[Peer, ...] = tuple(peer for module in MODULES for peer in module.PEERS)

__all__ = ["PEERS", "Peer", "Unsupported"]
