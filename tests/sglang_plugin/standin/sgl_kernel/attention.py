"""Attention of a tree, which SGLang's backend `torch_native` does not have: a hook around it."""

import torch

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend"


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    HookRegistry.register(BACKEND, forward_extend, HookType.AROUND)


def forward_extend(original, self, q, k, v, layer, batch, save_kv_cache=True):
    if not batch.forward_mode.is_target_verify():
        return original(self, q, k, v, layer, batch, save_kv_cache)
    heads, size = layer.tp_q_head_num, layer.qk_head_dim
    keys, values = (
        buffer(layer.layer_id)
        for buffer in (self.token_to_kv_pool.get_key_buffer, self.token_to_kv_pool.get_value_buffer)
    )
    keys[batch.out_cache_loc] = k.view(-1, *keys.shape[1:])
    values[batch.out_cache_loc] = v.view(-1, *values.shape[1:])
    n = batch.spec_info.draft_token_num
    trees = batch.spec_info.custom_mask.view(-1, n, n)
    rows = q.view(-1, n, heads, size)
    out = torch.empty_like(rows)
    lengths, requests = batch.seq_lens.tolist(), batch.req_pool_indices
    for i, (length, request) in enumerate(zip(lengths, requests, strict=True)):
        slots = self.req_to_token_pool.req_to_token[request, : length + n].long()
        mask = torch.cat([torch.ones(n, length, dtype=torch.bool), trees[i]], 1)
        out[i] = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (rows[i], keys[slots], values[slots])),
            attn_mask=mask, scale=layer.scaling, enable_gqa=True,
        ).transpose(0, 1)  # fmt: skip
    return out.view(q.shape)
