#pragma once
// Digests of buffers, by which it is seen that their bytes have changed.
#include <cstdint>
#include <vector>

#include "specdec/parallel.h"

namespace specdec::host {

struct Buffer {
  const char* data;  // [size], of any alignment
  int64_t size;      // in bytes
};

// One for each buffer, the same for any number of threads. Other bytes, or another size, have the
// same digest with probability 2^-63, unless they were chosen by who knows the keys.
std::vector<uint64_t> digests(const std::vector<Buffer>& buffers, const Parallel& parallel);

}  // namespace specdec::host
