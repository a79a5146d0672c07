#pragma once
// How many threads run the kernels where no framework says it.
#include "specdec/parallel.h"

namespace specdec::cpu {

// At first OMP_NUM_THREADS, or where that is not set the number of processors.
int num_threads();
void set_num_threads(int n);

// Runs on so many of the threads of `pooled`.
Parallel counted();

}  // namespace specdec::cpu
