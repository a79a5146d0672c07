#pragma once
// How the CUDA launchers share work among thread blocks. No result depends on it.
//   block group  the thread-block cluster, or the single block, that works on one row at a time
//   split        the part of a row that one group reads when several groups share it
#include <cstdint>

namespace specdec {

// kAuto chooses by the number of sequences and the size of the device.
// kLazy, for many sequences: a group reads the rows of a sequence in order and stops at the first
// rejection. kParallel, for few: several groups share the rows of a sequence, and the last one to
// finish decides from their statistics.
enum class Schedule : int32_t { kAuto, kLazy, kParallel };

struct CudaRequest {
  Schedule schedule;
  int32_t group_size;  // blocks in a group, 1 to 8; 0 lets the launcher choose
};

struct CudaPlan {
  bool parallel;
  int32_t group_size;
  int32_t splits;  // how many groups share a row; 1 unless `parallel`
  int64_t groups;
  int64_t workspace_bytes;  // device memory, which need not be cleared
};

}  // namespace specdec
