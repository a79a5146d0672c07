#pragma once
// Truncation of ring buffers: token t lives in slot t % S, and takes it from token t - S.
#include "specdec/kv.h"

namespace specdec {

struct RingTruncateParams {
  const KvTensor* tensors;  // [num_tensors], on the host
  int64_t num_tensors;
  int64_t batch;
  int64_t slots;   // of the shortest ring; 0 without caches
  int64_t window;  // tokens that must be there, at most `slots`
  KvVector<int64_t> lengths;
  KvVector<const int64_t> new_lengths;
  int32_t* status;  // [B]
  bool zero_fill;
};

// The slots of the tokens that truncation drops and whose slot is nobody else's; they may go on
// from the last slot to the first. No sum here can overflow.
SPECDEC_HD inline KvRange dropped_ring_slots(int64_t length, int64_t new_length, int64_t slots) {
  const int64_t kept = truncated_length(length, new_length);
  if (length <= kept || slots == 0) return {0, 0};
  const int64_t begin = kept > length - slots ? kept : length - slots;
  return {begin % slots, length - begin};
}

// Whether a token of the window before the new length had lost its slot to a dropped one.
SPECDEC_HD inline bool window_is_lost(int64_t length, int64_t new_length, int64_t slots,
                                      int64_t window) {
  const int64_t kept = truncated_length(length, new_length);
  const int64_t first = kept > window ? kept - window : 0;
  return slots > 0 && kept > 0 && first < length - slots;
}

namespace cpu {
void ring_truncate(const RingTruncateParams& p, const Parallel& parallel);
}  // namespace cpu

// As in kv.h.
namespace cuda {
int ring_truncate(const RingTruncateParams& p, void* stream);
}  // namespace cuda

}  // namespace specdec
