"""The implementations that are compared, one file each.

A peer's package is imported only when the peer is built; none of its code is copied here.
"""

from __future__ import annotations

from bench.peers import (
    compiled,
    eager_rule,
    eager_tree,
    flashinfer,
    hf,
    kv_copy,
    ours,
    sglang_tree,
    vllm_v1,
    vllm_v2,
)
from bench.peers.base import Peer, Unsupported

MODULES = (
    ours,
    eager_rule,
    compiled,
    hf,
    vllm_v1,
    vllm_v2,
    flashinfer,
)
PEERS: tuple[Peer, ...] = tuple(peer for module in MODULES for peer in module.PEERS)
TREE_PEERS: tuple[Peer, ...] = (*ours.TREE_PEERS, *eager_tree.PEERS, *sglang_tree.PEERS)
KV_PEERS: tuple[Peer, ...] = (*ours.KV_PEERS, *kv_copy.PEERS)

__all__ = ["KV_PEERS", "PEERS", "TREE_PEERS", "Peer", "Unsupported"]
