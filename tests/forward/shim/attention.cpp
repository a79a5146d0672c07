// The kernels of one instruction set, called with pointers to dense tensors.
#include <memory>

#include "cpu/forward/attention_tile.cpp"

// `sizes` are B, H, H_kv, n, S, D and D_v.
extern "C" void cached_attention(const void* query, const void* keys, const void* values,
                                 const void* mask, void* out, int dtype, const int64_t* sizes,
                                 float scale, float soft_cap, int64_t begin, int64_t end) {
  using namespace specdec;
  const int64_t heads = sizes[1], kv_heads = sizes[2], queries = sizes[3], slots = sizes[4];
  const int64_t size = sizes[5], value_size = sizes[6];
  const CachedAttentionParams p = {query,
                                   keys,
                                   values,
                                   static_cast<const uint8_t*>(mask),
                                   out,
                                   static_cast<DType>(dtype),
                                   sizes[0],
                                   heads,
                                   kv_heads,
                                   queries,
                                   slots,
                                   size,
                                   value_size,
                                   {heads * queries * size, queries * size, size},
                                   {kv_heads * slots * size, slots * size, size},
                                   {kv_heads * slots * value_size, slots * value_size, value_size},
                                   queries * slots,
                                   slots,
                                   scale,
                                   soft_cap};
  const cpu::AttentionKernels& kernels = cpu::attention_kernels_shim;
  const std::unique_ptr<float[]> scratch(new float[kernels.scratch_size(p)]);
  kernels.attend[dtype](p, scratch.get(), begin, end);
}
