#include "cpu/forward/linear.h"

#include <algorithm>
#include <cstring>

#include "cpu/capability.h"
#include "cpu/forward/linear_tile.h"

namespace specdec::cpu {

extern const LinearKernels linear_kernels_plain;
#ifdef __x86_64__
extern const LinearKernels linear_kernels_avx2;
extern const LinearKernels linear_kernels_avx512;
extern const LinearKernels linear_kernels_avx512_bf16;
extern const LinearKernels linear_kernels_amx_bf16;
#endif

namespace {

// Less work, in bytes of weights and in products, is not worth waking a thread.
constexpr int64_t kWorthwhileBytes = 1 << 17, kWorthwhileProducts = 1 << 19;

const LinearKernels& linear_kernels() {
#ifdef __x86_64__
  switch (capability()) {
    case Capability::kAmxBf16:
      return linear_kernels_amx_bf16;
    case Capability::kAvx512Bf16:
      return linear_kernels_avx512_bf16;
    case Capability::kAvx512:
      return linear_kernels_avx512;
    case Capability::kAvx2:
      return linear_kernels_avx2;
    case Capability::kPlain:
      break;
  }
#endif
  return linear_kernels_plain;
}

int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Transposes a square of as many outputs as a register has steps. Interleaving the halves of the
// square does so after one round for each bit of its size.
template <class Step>
void pack_square(const char* from, int64_t row_bytes, char* to, int64_t step_bytes) {
  constexpr int kSize = 16 / sizeof(Step);
  typedef Step Steps __attribute__((vector_size(16)));
  Steps rows[kSize], next[kSize];
  for (int i = 0; i < kSize; ++i) std::memcpy(&rows[i], from + i * row_bytes, 16);
  for (int round = 1; round < kSize; round *= 2) {
    for (int i = 0; i < kSize / 2; ++i) {
      const Steps a = rows[i], b = rows[i + kSize / 2];
      if constexpr (kSize == 4) {
        next[2 * i] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
        next[2 * i + 1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      } else {
        next[2 * i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
        next[2 * i + 1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
      }
    }
    std::memcpy(rows, next, sizeof rows);
  }
  for (int i = 0; i < kSize; ++i) std::memcpy(to + i * step_bytes, &rows[i], 16);
}

// Moves the weights of one panel; Step is the inputs of a step, which stay together. It takes a few
// steps of every output at a time, so that each cache line of the weight is read once.
template <class Step>
void pack_panel(const char* weight, int64_t row_bytes, int64_t outputs, const PanelLayout& layout,
                char* panel) {
  constexpr int64_t kBytes = sizeof(Step), kSteps = 64 / kBytes, kSquare = 16 / kBytes;
  const int64_t whole = row_bytes / kBytes, step_bytes = layout.width * kBytes;
  std::memset(panel, 0, outputs < layout.width ? layout.steps * step_bytes : 0);
  for (int64_t begin = 0; begin < layout.steps; begin += kSteps) {
    const int64_t end = std::min(begin + kSteps, layout.steps);
    int64_t n = 0;
    for (; begin + kSteps <= whole && n + kSquare <= outputs; n += kSquare) {
      const char* from = weight + n * row_bytes;
      for (int64_t k = begin; k < end; k += kSquare) {
        char* to = panel + k * step_bytes + n * kBytes;
        pack_square<Step>(from + k * kBytes, row_bytes, to, step_bytes);
      }
    }
    for (; n < outputs; ++n) {
      const char* from = weight + n * row_bytes;
      for (int64_t k = begin; k < end; ++k) {
        Step step = 0;
        std::memcpy(&step, from + k * kBytes, k < whole ? kBytes : row_bytes - k * kBytes);
        std::memcpy(panel + k * step_bytes + n * kBytes, &step, sizeof step);
      }
    }
  }
}

// Group i of the rows.
PackedLinearParams group(PackedLinearParams p, int64_t i) {
  const int64_t first = i * kGroupRows;
  p.x = static_cast<const char*>(p.x) + first * p.in_features * size_of(p.dtype);
  p.y = static_cast<char*>(p.y) + first * p.weight.out_features * size_of(p.dtype);
  p.rows = std::min(p.rows - first, kGroupRows);
  return p;
}

}  // namespace

int64_t panel_width() { return linear_kernels().width; }

void pack_linear(const PackLinearParams& p, const Parallel& parallel) {
  const PanelLayout layout(p.dtype, p.out_features, p.in_features, panel_width());
  const int64_t row_bytes = p.in_features * size_of(p.dtype);
  const int64_t panel_bytes = layout.steps * layout.width * layout.inputs * size_of(p.dtype);
  parallel(layout.panels, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i * layout.width;
      const char* weight = static_cast<const char*>(p.weight) + first * row_bytes;
      char* panel = static_cast<char*>(p.panels) + i * panel_bytes;
      const int64_t outputs = std::min(layout.width, p.out_features - first);
      if (p.dtype == DType::kFloat16) {
        pack_panel<uint16_t>(weight, row_bytes, outputs, layout, panel);
      } else {
        pack_panel<uint32_t>(weight, row_bytes, outputs, layout, panel);
      }
    }
  });
}

void unpack_blocks(const UnpackBlocksParams& p, const Parallel& parallel) {
  const BlockFormat format = block_format(p.format);
  const int64_t width = panel_width(), blocks = p.in_features / format.inputs;
  const int64_t bytes = format.bytes() * width;
  const UnpackBlocks unpack = linear_kernels().unpack(p.format);
  parallel((p.out_features + width - 1) / width, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> floats(new float[static_cast<size_t>(format.inputs * width)]);
    for (int64_t i = begin * blocks; i < end * blocks; ++i) {
      const int64_t first = i / blocks * width, outputs = std::min(width, p.out_features - first);
      unpack(static_cast<const char*>(p.panels) + i * bytes, format.inputs, floats.get());
      float* to = p.weight + first * p.in_features + i % blocks * format.inputs;
      for (int64_t n = 0; n < outputs; ++n, to += p.in_features) {
        for (int64_t k = 0; k < format.inputs; ++k) to[k] = floats[k * width + n];
      }
    }
  });
}

LinearInput::LinearInput(const void* x, DType dtype, int64_t rows, int64_t in_features,
                         const Parallel& threads)
    : params_{x, {}, nullptr, dtype, rows, in_features} {
  const LinearKernel& kernel = linear_kernels().of_dtype[static_cast<int>(dtype)];
  const int64_t bytes = kernel.rows_bytes(params_);
  if (bytes == 0) return;
  row_bytes_ = bytes / rows;
  read_.reset(new char[static_cast<size_t>(bytes)]);
  threads(groups(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      kernel.read_rows(group(params_, i), read_.get() + i * kGroupRows * row_bytes_);
    }
  });
}

int64_t LinearInput::groups() const { return (params_.rows + kGroupRows - 1) / kGroupRows; }

int64_t LinearInput::share() const {
  return std::max<int64_t>(panel_width(), 64 / size_of(params_.dtype));
}

int64_t LinearInput::shares(int64_t out_features) const {
  return (out_features + share() - 1) / share();
}

void LinearInput::multiply(const PackedWeight& weight, void* y, int64_t begin, int64_t end) const {
  const LinearKernels& kernels = linear_kernels();
  const LinearKernel& kernel = kernels.of_dtype[static_cast<int>(params_.dtype)];
  PackedLinearParams p = params_;
  p.weight = weight;
  p.y = y;
  const int64_t panels = (weight.out_features + kernels.width - 1) / kernels.width;
  const int64_t first = begin * share() / kernels.width, last = end * share() / kernels.width;
  for (int64_t i = 0; i < groups(); ++i) {
    const PackedLinearParams part = group(p, i);
    const void* rows = read_ ? read_.get() + i * kGroupRows * row_bytes_ : part.x;
    kernel.multiply(part, rows, first, std::min(last, panels));
  }
}

Parallel worth_threads(const Parallel& threads, DType dtype, int64_t rows, int64_t weights) {
  const bool worthwhile =
      weights * size_of(dtype) >= kWorthwhileBytes || weights * rows >= kWorthwhileProducts;
  return worthwhile ? threads : serial();
}

void packed_linear(const PackedLinearParams& p, const Parallel& threads) {
  if (p.rows == 0) return;
  const int64_t outputs = p.weight.out_features;
  const Parallel parallel = worth_threads(threads, p.dtype, p.rows, outputs * p.in_features);
  const LinearInput input(p.x, p.dtype, p.rows, p.in_features, parallel);
  parallel(input.shares(outputs),
           [&](int64_t begin, int64_t end) { input.multiply(p.weight, p.y, begin, end); });
}

}  // namespace specdec::cpu
