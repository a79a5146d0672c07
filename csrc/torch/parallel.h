#pragma once
#include "specdec/parallel.h"

namespace specdec {

// Threads of torch's own pool, as many as torch.set_num_threads allows now.
Parallel torch_parallel();

}  // namespace specdec
