"""The verification step of speculative decoding as fused PyTorch ops.

`sample` draws the drafts or `ngram_propose` copies them, `verify_chain` and `verify_tree` decide
which of them are accepted and sample the recovered or bonus token, and the cache ops remove the
rejected tokens from the KV cache.
"""

from torch import serialization as _serialization

from ._library import bfloat16_products, cpu_capability, has_cuda_kernels, providers
from ._warm_up import warm_up
from .arguments.draft_forms import DraftMap, SampledDraft, SparseDraft
from .arguments.noise import draft_positions
from .arguments.rules import (
    LOSSLESS_RULES,
    LOSSLESS_TREE_RULES,
    RULES,
    RULES_READING_DRAFT,
    TREE_RULES,
    TREE_RULES_READING_DRAFT,
    Rule,
    TreeRule,
)
from .arguments.status import Status
from .arguments.weight_blocks import BLOCK_FORMATS
from .arguments.workspace import (
    sample_workspace_bytes,
    verify_chain_workspace_bytes,
    verify_tree_workspace_bytes,
)
from .ops.apply_penalties import apply_penalties_
from .ops.attention import cached_attention
from .ops.decoder_layer import (
    PackedDecoderLayer,
    PackedDecoderLayers,
    decoder_layers_,
    norm_qkv_rope,
    output_norm_mlp,
)
from .ops.expand_tree import Expansion, expand_tree
from .ops.grow_tree import GrownTree, PackedHead, grow_tree_
from .ops.kept_tokens import KeptCsr, KeptTokens, kept_to_csr, kept_tokens
from .ops.kv import (
    kv_append_,
    kv_compact_,
    kv_realign_,
    kv_truncate_,
    ring_truncate_,
    state_select_,
)
from .ops.linear import PackedLinear, pack_linear, packed_linear
from .ops.ngram_propose import NgramDraft, ngram_propose
from .ops.paged import (
    FreedBlocks,
    paged_append_,
    paged_compact_,
    paged_truncate_,
)
from .ops.sample import Sampled, sample
from .ops.tree_layout import (
    RankedTree,
    TreeAttention,
    Trie,
    build_trie,
    rerank_tree,
    tree_attention,
)
from .ops.verify_chain import Verdict, verify_chain
from .ops.verify_tree import Tree, TreeVerdict, verify_tree
from .ops.weight_blocks import pack_blocks, unpack_blocks

__version__ = "0.1.0"

__all__ = [
    "BLOCK_FORMATS",
    "LOSSLESS_RULES",
    "LOSSLESS_TREE_RULES",
    "RULES",
    "RULES_READING_DRAFT",
    "TREE_RULES",
    "TREE_RULES_READING_DRAFT",
    "DraftMap",
    "Expansion",
    "FreedBlocks",
    "GrownTree",
    "KeptCsr",
    "KeptTokens",
    "NgramDraft",
    "PackedDecoderLayer",
    "PackedDecoderLayers",
    "PackedHead",
    "PackedLinear",
    "RankedTree",
    "Rule",
    "Sampled",
    "SampledDraft",
    "SparseDraft",
    "Status",
    "Tree",
    "TreeAttention",
    "TreeRule",
    "TreeVerdict",
    "Trie",
    "Verdict",
    "apply_penalties_",
    "bfloat16_products",
    "build_trie",
    "cached_attention",
    "cpu_capability",
    "decoder_layers_",
    "draft_positions",
    "expand_tree",
    "grow_tree_",
    "has_cuda_kernels",
    "kept_to_csr",
    "kept_tokens",
    "kv_append_",
    "kv_compact_",
    "kv_realign_",
    "kv_truncate_",
    "ngram_propose",
    "norm_qkv_rope",
    "output_norm_mlp",
    "pack_blocks",
    "pack_linear",
    "packed_linear",
    "paged_append_",
    "paged_compact_",
    "paged_truncate_",
    "providers",
    "rerank_tree",
    "ring_truncate_",
    "sample",
    "sample_workspace_bytes",
    "state_select_",
    "tree_attention",
    "unpack_blocks",
    "verify_chain",
    "verify_chain_workspace_bytes",
    "verify_tree",
    "verify_tree_workspace_bytes",
    "warm_up",
]

# `torch.load` refuses classes that it does not know; tuples of tensors and a number do no harm.
_serialization.add_safe_globals(
    [kind for kind in map(globals().get, __all__) if isinstance(kind, type)]
)
