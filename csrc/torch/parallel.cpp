#include "torch/parallel.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/threads.h"

namespace specdec {

Parallel torch_parallel() {
  return cpu::pooled(static_cast<int>(torch::stable::get_num_threads()));
}

}  // namespace specdec
