#pragma once
// Products of one input with packed weights, for all that is made of linear layers.
#include <memory>

#include "specdec/linear.h"

namespace specdec::cpu {

// The rows of an input in the form that the kernels read, made once for several weights.
class LinearInput {
 public:
  // x is [rows, in_features] with at least one row, and must outlive this object.
  LinearInput(const void* x, DType dtype, int64_t rows, int64_t in_features,
              const Parallel& threads);

  // How many outputs are a share. It fills whole cache lines of a row of y, so that threads with
  // different shares never write the same one.
  int64_t share() const;
  int64_t shares(int64_t out_features) const;
  // Writes the shares [begin, end) of y, [rows, out_features].
  void multiply(const PackedWeight& weight, void* y, int64_t begin, int64_t end) const;

 private:
  int64_t groups() const;

  PackedLinearParams params_;  // without a weight
  std::unique_ptr<char[]> read_;
  int64_t row_bytes_ = 0;
};

// The threads that so many weights and rows are worth: waking one takes longer than little work.
Parallel worth_threads(const Parallel& threads, DType dtype, int64_t rows, int64_t weights);

}  // namespace specdec::cpu
