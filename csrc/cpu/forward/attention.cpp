#include "specdec/attention.h"

#include <algorithm>
#include <memory>

#include "cpu/capability.h"
#include "cpu/forward/attention_tile.h"

namespace specdec::cpu {

extern const AttentionKernels attention_kernels_plain;
#ifdef __x86_64__
extern const AttentionKernels attention_kernels_avx2;
extern const AttentionKernels attention_kernels_avx512;
#endif

namespace {

// Fewer products are not worth waking a thread.
constexpr int64_t kWorthwhileProducts = 1 << 18;

const AttentionKernels& attention_kernels() {
#ifdef __x86_64__
  switch (capability()) {
    case Capability::kAmxBf16:
    case Capability::kAvx512Bf16:
    case Capability::kAvx512:
      return attention_kernels_avx512;
    case Capability::kAvx2:
      return attention_kernels_avx2;
    case Capability::kPlain:
      break;
  }
#endif
  return attention_kernels_plain;
}

}  // namespace

void cached_attention(const CachedAttentionParams& p, const Parallel& threads) {
  const int64_t rows = p.batch * p.heads * p.queries;
  if (rows == 0) return;
  const AttentionKernels& kernels = attention_kernels();
  const auto attend = kernels.attend[static_cast<int>(p.dtype)];
  const bool worthwhile =
      static_cast<double>(rows) * p.slots * (p.size + p.value_size) >= kWorthwhileProducts;
  const Parallel parallel = worthwhile ? threads : serial();
  // Each thread takes equally many rows: heads of keys are often fewer than would balance.
  const int64_t parts = std::min<int64_t>(rows, parallel.threads), size = kernels.scratch_size(p);
  const std::unique_ptr<float[]> scratch(new float[static_cast<size_t>(parts * size)]);
  parallel(parts, [&](int64_t begin, int64_t end) {
    attend(p, scratch.get() + begin * size, rows * begin / parts, rows * end / parts);
  });
}

}  // namespace specdec::cpu
