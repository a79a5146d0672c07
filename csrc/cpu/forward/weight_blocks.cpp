#include <algorithm>
#include <cstring>

#include "cpu/forward/linear.h"

namespace specdec::cpu {
namespace {

// A block of one output as a file has it, read into whole numbers.
struct FileBlock {
  uint8_t halves[4];               // the scale, then the minimum
  uint8_t scales[16], minima[16];  // of parts; those of Q6_K are signed
  uint8_t q[256];                  // before the bias; those of Q8_0 are signed

  FileBlock(WeightFormat format, const uint8_t* from) {
    const BlockFormat block = block_format(format);
    if (format == WeightFormat::kQ6_K) {
      read_q6_k(from);
      return;
    }
    std::memcpy(halves, from, 4);
    from += block.has_minimum ? 4 : 2;
    if (block.bits == 8) {
      std::memcpy(q, from, static_cast<size_t>(block.inputs));
      return;
    }
    if (block.scales > 0) from = read_scales(from);
    const uint8_t* const high = from;
    if (block.bits == 5) from += block.inputs / 8;
    // Byte i has the lowest bits of input i and of that half a group behind it.
    const int64_t half = block.scales > 0 ? 32 : 16;
    for (int64_t k = 0; k < block.inputs; ++k) {
      const int64_t group = k / (2 * half), i = group * half + k % half;
      q[k] = (from[i] >> k / half % 2 * 4) & 15;
      if (block.bits != 5) continue;
      // Of small blocks bit k of a word, of large ones bit k / 32 of byte k % 32.
      const int bit = block.scales > 0 ? high[k % 32] >> k / 32 : high[k / 8] >> k % 8;
      q[k] = static_cast<uint8_t>(q[k] | (bit & 1) << 4);
    }
  }

 private:
  // Eight scales and eight minima of 6 bits in 12 bytes: the last four have their lowest 4 bits in
  // the last four bytes, the others on top of the first four.
  const uint8_t* read_scales(const uint8_t* from) {
    for (int i = 0; i < 4; ++i) {
      scales[i] = from[i] & 63;
      minima[i] = from[i + 4] & 63;
      scales[i + 4] = static_cast<uint8_t>((from[i + 8] & 15) | from[i] >> 6 << 4);
      minima[i + 4] = static_cast<uint8_t>(from[i + 8] >> 4 | from[i + 4] >> 6 << 4);
    }
    return from + 12;
  }

  void read_q6_k(const uint8_t* from) {
    for (int k = 0; k < 256; ++k) {
      // Of 128 inputs, a byte of the lowest bits serves two that are 64 apart, and one of the
      // highest serves four that are 32 apart.
      const int half = k / 128, i = k % 128;
      const int low = from[half * 64 + i % 64] >> i / 64 * 4;
      const int high = from[128 + half * 32 + i % 32] >> i / 32 * 2;
      q[k] = static_cast<uint8_t>((low & 15) | (high & 3) << 4);
    }
    std::memcpy(scales, from + 192, 16);
    std::memcpy(halves, from + 208, 2);
  }
};

// Writes one output of a block of a panel.
void put_block(const FileBlock& block, const BlockFormat& format, int64_t width, int64_t n,
               uint8_t* panel) {
  for (int i = 0; i < (format.has_minimum ? 2 : 1); ++i, panel += 2 * width) {
    std::memcpy(panel + 2 * n, block.halves + 2 * i, 2);
  }
  for (int64_t i = 0; i < format.scales; ++i, panel += width) panel[n] = block.scales[i];
  const int64_t minima = format.has_minimum ? format.scales : 0;
  for (int64_t i = 0; i < minima; ++i, panel += width) panel[n] = block.minima[i];
  if (format.bits == 8) {
    for (int64_t k = 0; k < format.inputs; ++k) panel[k * width + n] = block.q[k];
    return;
  }
  // Words of 32 bits: first the lowest 4 of each q, then the others.
  for (int64_t shift = 0; shift < format.bits; shift += 4) {
    const int64_t bits = std::min<int64_t>(format.bits - shift, 4), inputs = 32 / bits;
    for (int64_t first = 0; first < format.inputs; first += inputs, panel += 4 * width) {
      uint32_t word = 0;
      for (int64_t i = 0; i < inputs; ++i) {
        const uint32_t value = block.q[first + i] >> shift & ((1u << bits) - 1);
        word |= value << i * bits;
      }
      std::memcpy(panel + 4 * n, &word, sizeof word);
    }
  }
}

}  // namespace

void pack_blocks(const PackBlocksParams& p, const Parallel& parallel) {
  const BlockFormat format = block_format(p.format);
  const int64_t width = panel_width(), blocks = p.in_features / format.inputs;
  const int64_t bytes = format.bytes() * width;
  parallel((p.out_features + width - 1) / width, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      auto* to = static_cast<uint8_t*>(p.panels) + panel * blocks * bytes;
      const int64_t first = panel * width, outputs = std::min(width, p.out_features - first);
      if (outputs < width) std::memset(to, 0, static_cast<size_t>(blocks * bytes));
      for (int64_t n = 0; n < outputs; ++n) {
        const auto* from =
            static_cast<const uint8_t*>(p.blocks) + (first + n) * blocks * format.file_bytes;
        for (int64_t i = 0; i < blocks; ++i) {
          put_block({p.format, from + i * format.file_bytes}, format, width, n, to + i * bytes);
        }
      }
    }
  });
}

}  // namespace specdec::cpu
