#pragma once
// How the CUDA launchers share work out. No result depends on any of it.
#include <cstdint>

namespace specdec {

// Row-lazy: a group walks the rows of a sequence and stops early; for many sequences. Row-parallel:
// the device reads all rows at once, the last group to finish walks over what was found; for few.
enum class Schedule : int32_t { kAuto, kLazy, kParallel };

struct CudaRequest {
  Schedule schedule;
  int32_t group_size;  // blocks that work on one sequence, 1, 2, 4 or 8; 0: by size
};

struct CudaPlan {
  bool parallel;
  int32_t group_size;
  int32_t splits;  // groups that share a row, in the row-parallel schedule
  int64_t groups;
  int64_t workspace_bytes;  // of device memory, with anything in it
};

}  // namespace specdec
