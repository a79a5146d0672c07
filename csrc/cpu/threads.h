#pragma once
// The threads on which the kernels run.
#include "specdec/parallel.h"

namespace specdec::cpu {

// Runs on the calling thread and on up to `threads` - 1 of this process that wait for work. They
// serve one call at a time; a call that comes meanwhile, or from inside another, runs on the thread
// of its caller. The first exception of a body is thrown again.
Parallel pooled(int threads);

}  // namespace specdec::cpu
