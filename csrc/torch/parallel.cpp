#include "torch/parallel.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

namespace specdec {

Parallel torch_parallel() {
  return {[](void*, int64_t n, void (*body)(void*, int64_t, int64_t), void* context) {
            torch::stable::parallel_for(
                0, n, 1, [&](int64_t begin, int64_t end) { body(context, begin, end); });
          },
          nullptr, static_cast<int>(torch::stable::get_num_threads())};
}

}  // namespace specdec
