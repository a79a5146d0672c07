#pragma once
// Parameters of the op that moves the tokens of each sequence to the right or to the left, because
// the padding of its batch changed.
#include "specdec/kv.h"

namespace specdec {

struct KvRealignParams {
  const KvTensor* tensors;  // [num_tensors], on the host
  int64_t num_tensors;
  int64_t batch;
  KvVector<const void> starts, lengths, shifts;
  bool zero_fill;
};

// How the tokens of one sequence move. Slots are counted by their distance from the trailing end of
// the range, in the direction of the shift: the token at distance d moves to distance d + step, and
// no token moves to the distances [0, vacated). Distances that differ by a multiple of step form a
// chain. Chains have no slot in common, so they can move in any order; within a chain the token at
// the largest distance moves first, so that no slot is read after it was written.
struct KvShift {
  int64_t origin;     // slot at distance 0
  int64_t direction;  // 1 or -1
  int64_t step;
  int64_t size;     // tokens that move: distances [0, size)
  int64_t vacated;  // at most step

  SPECDEC_HD int64_t slot(int64_t distance) const { return origin + direction * distance; }
  // The slots at the distances [0, n).
  SPECDEC_HD KvRange slots(int64_t n) const { return {direction > 0 ? origin : origin - n + 1, n}; }
};

// No sum here can overflow, whatever the arguments.
SPECDEC_HD inline KvShift realigned(int64_t start, int64_t length, int64_t shift, int64_t slots) {
  const auto clamp = [slots](int64_t slot) { return slot < 0 ? 0 : slot < slots ? slot : slots; };
  const int64_t begin = clamp(start);
  int64_t end = begin;
  if (length > 0) {
    end = start < 0 ? clamp(start + length) : length < slots - begin ? begin + length : slots;
  }
  const int64_t range = end > begin ? end - begin : 0;
  if (shift == 0 || range == 0) return {begin, 1, 0, 0, 0};
  const int64_t step = shift < -slots || shift > slots ? slots : shift < 0 ? -shift : shift;
  const int64_t room = (shift > 0 ? slots - begin : end) - step;
  const int64_t size = room < 0 ? 0 : room < range ? room : range;
  const int64_t vacated = step < range ? step : range;
  return {shift > 0 ? begin : end - 1, shift > 0 ? 1 : -1, step, size, vacated};
}

namespace cpu {
void kv_realign(const KvRealignParams& p, const Parallel& parallel);
}  // namespace cpu

// As in kv.h: a cudaError_t, a cudaStream_t.
namespace cuda {
int kv_realign(const KvRealignParams& p, void* stream);
}  // namespace cuda

}  // namespace specdec
