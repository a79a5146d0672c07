// The suffix array of a text: the places of all its suffixes in ascending order.
#pragma once
#include <cstdint>
#include <functional>

namespace specdec::host {

// Told the finished part, in [0, 1]. Throwing ends the work.
using Progress = std::function<void(double)>;

// Writes the suffix array [n] of tokens [n] in [0, 2^31), by induced sorting (Nong, Zhang and Chan,
// Two efficient algorithms for linear time suffix array construction, 2011). n < 2^31. It needs
// about 10 bytes a token beside its arguments.
void sort_suffixes(const int32_t* tokens, int64_t n, int32_t* suffixes, const Progress& progress);

}  // namespace specdec::host
