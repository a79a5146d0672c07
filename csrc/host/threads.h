#pragma once
// The threads on which specdec_host runs the kernels.
#include "specdec/parallel.h"

namespace specdec {

// Runs on the threads of this process that wait for work. They serve one call at a time; a call
// that comes meanwhile runs on the thread of its caller.
Parallel host_parallel();

// At first OMP_NUM_THREADS, or where that is not set the number of processors.
int num_threads();
void set_num_threads(int n);

}  // namespace specdec
