#pragma once
// Parameters of ring_truncate_, which truncates ring buffers: token t is kept in slot t % S, where
// it overwrote token t - S.
#include "specdec/kv.h"

namespace specdec {

struct RingTruncateParams {
  const KvTensor* tensors;  // [num_tensors], on the host
  int64_t num_tensors;
  int64_t batch;
  int64_t slots;   // of the cache with the fewest; 0 without caches
  int64_t window;  // how many tokens before the new length must be present, at most `slots`
  KvVector<void> lengths;
  KvVector<const void> new_lengths;
  int32_t* status;  // [B]
  bool zero_fill;
};

// The slots that hold tokens which truncation drops. The range may wrap around from the last slot
// to the first. No sum here can overflow.
SPECDEC_HD inline KvRange dropped_ring_slots(int64_t length, int64_t new_length, int64_t slots) {
  const int64_t kept = truncated_length(length, new_length);
  if (length <= kept || slots == 0) return {0, 0};
  const int64_t begin = kept > length - slots ? kept : length - slots;
  return {begin % slots, length - begin};
}

// Whether a dropped token had overwritten a token of the window before the new length.
SPECDEC_HD inline bool window_is_lost(int64_t length, int64_t new_length, int64_t slots,
                                      int64_t window) {
  const int64_t kept = truncated_length(length, new_length);
  const int64_t first = kept > window ? kept - window : 0;
  return slots > 0 && kept > 0 && first < length - slots;
}

namespace cpu {
void ring_truncate(const RingTruncateParams& p, const Parallel& parallel);
}  // namespace cpu

// As in kv.h: a cudaError_t, a cudaStream_t.
namespace cuda {
int ring_truncate(const RingTruncateParams& p, void* stream);
}  // namespace cuda

}  // namespace specdec
