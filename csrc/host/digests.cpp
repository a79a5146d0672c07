// The digest of a block is NH with words of 64 bits (Black, Halevi, Krawczyk, Krovetz and Rogaway,
// UMAC: fast and secure message authentication, 1999): the sum of (x[2i] + k[2i]) (x[2i + 1] +
// k[2i + 1]) modulo 2^128, which is the same for two blocks with probability 2^-64. Scalars keep up
// with memory here, because one multiplication takes 16 bytes, and vectors have no such product.
#include "host/digests.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace specdec::host {
namespace {

constexpr int64_t kWords = 1024, kBlock = 8 * kWords;
constexpr int64_t kLine = 8;     // words of a line of the cache
constexpr int64_t kPage = 4096;  // bytes; processors prefetch no further than to the end of a page
constexpr uint64_t kOdd = 0x9E3779B97F4A7C15u;

// The last step of SplitMix64 (Steele, Lea and Flood, 2014), which is a bijection.
constexpr uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

struct Keys {
  uint64_t word[kWords] = {};
  constexpr Keys() {
    for (int64_t i = 0; i < kWords; ++i) word[i] = mixed(kOdd * static_cast<uint64_t>(i + 1));
  }
};
constexpr Keys kKeys;

uint64_t keyed(const char* block, int64_t i) {
  uint64_t word;
  std::memcpy(&word, block + 8 * i, sizeof(word));
  return word + kKeys.word[i];
}

// Blocks that change places change their digests, too.
uint64_t digest_of_block(const char* block, int64_t place) {
  unsigned __int128 sum = 0;
  for (int64_t line = 0; line < kWords; line += kLine) {
    __builtin_prefetch(block + 8 * line + kPage, 0, 2);
    for (int64_t i = line; i < line + kLine; i += 2) {
      sum += static_cast<unsigned __int128>(keyed(block, i)) * keyed(block, i + 1);
    }
  }
  const uint64_t low = static_cast<uint64_t>(sum) + static_cast<uint64_t>(place) * kOdd;
  return mixed(mixed(low) ^ static_cast<uint64_t>(sum >> 64));
}

// The sum over blocks [begin, end) of a buffer; the last one is filled up with zeros.
uint64_t digest_of_blocks(const Buffer& buffer, int64_t begin, int64_t end) {
  uint64_t sum = 0;
  for (int64_t place = begin; place < end; ++place) {
    const char* block = buffer.data + place * kBlock;
    const int64_t size = std::min(kBlock, buffer.size - place * kBlock);
    char filled[kBlock];
    if (size < kBlock) {
      std::memcpy(filled, block, static_cast<size_t>(size));
      std::memset(filled + size, 0, static_cast<size_t>(kBlock - size));
      block = filled;
    }
    sum += digest_of_block(block, place);
  }
  return sum;
}

}  // namespace

std::vector<uint64_t> digests(const std::vector<Buffer>& buffers, const Parallel& parallel) {
  const size_t n = buffers.size();
  std::vector<int64_t> ends;  // of the blocks of each buffer, all counted together
  int64_t end = 0;
  for (const Buffer& buffer : buffers) ends.push_back(end += (buffer.size + kBlock - 1) / kBlock);
  std::vector<std::atomic<uint64_t>> sums(n);
  parallel(end, [&](int64_t first, int64_t last) {
    size_t b =
        static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), first) - ends.begin());
    for (int64_t at = first; at < last; at = ends[b++]) {
      const int64_t begin = b == 0 ? 0 : ends[b - 1];
      sums[b] += digest_of_blocks(buffers[b], at - begin, std::min(last, ends[b]) - begin);
    }
  });
  std::vector<uint64_t> out(n);
  for (size_t b = 0; b < n; ++b) out[b] = mixed(sums[b] + static_cast<uint64_t>(buffers[b].size));
  return out;
}

}  // namespace specdec::host
