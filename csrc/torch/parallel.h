#pragma once
#include "specdec/parallel.h"

namespace specdec {

// Runs on torch's own thread pool, with as many threads as torch.set_num_threads allows now.
Parallel torch_parallel();

}  // namespace specdec
