// Compiled once per instruction set (SPECDEC_ISA). Nothing here may be an inline function of a
// shared header: the linker would keep one build of it for all processors.
#include "cpu/forward/linear_tile.h"

#include "cpu/forward/float_register.h"
#include "cpu/forward/weight_blocks_tile.h"

#define SPECDEC_CAT_(a, b) a##b
#define SPECDEC_CAT(a, b) SPECDEC_CAT_(a, b)

namespace specdec::cpu {
namespace {

constexpr int64_t kRun = 16;        // inputs whose products are summed in registers
constexpr int64_t kBlock = 256;     // at most; the weights of a block fit in the first-level cache
constexpr int64_t kBlockUnit = 32;  // a block consists of whole runs, and of whole tiles of AMX
// Whether a block of 16-bit weights for several passes is made floats once. AVX2 does so beside the
// products, in every pass, sooner than it stores them.
constexpr bool kWidensOnce = kLanes != 8;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// What a kernel knows of a dtype. A step is what a panel holds for kInputs inputs side by side, and
// each step is added in kParts products: `weights` returns those of register r for one of them, and
// `add` adds their product with the inputs at x.
struct Float32 {
  using Element = float;
  using Row = float;
  static constexpr int kInputs = 1, kParts = 1;
  static constexpr bool kPairs = false;
  static constexpr bool kWidens = false;

  static V widen(const float* p) { return load<V>(p); }
  static void narrow(V v, float* out) { store(out, v); }
  static V weights(const float* step, int, int r) { return load<V>(step + r * kLanes); }
  static V add(V sum, V weights, const float* x) {
    return multiply_add(weights, every_lane(*x), sum);
  }
};

struct Float16 {
  using Element = uint16_t;
  using Row = float;
  static constexpr int kInputs = 1, kParts = 1;
  static constexpr bool kPairs = false;
  static constexpr bool kWidens = kWidensOnce;

  static V widen(const uint16_t* p) { return from_float16(p); }
  static void narrow(V v, uint16_t* out) { to_float16(v, out); }
  static V weights(const uint16_t* step, int, int r) { return from_float16(step + r * kLanes); }
  static V add(V sum, V weights, const float* x) { return Float32::add(sum, weights, x); }
};

struct BFloat16 {
  using Element = uint16_t;
  using Row = float;
  static constexpr int kInputs = 2, kParts = 2;
  static constexpr bool kPairs = false;
  static constexpr bool kWidens = kWidensOnce;

  static V widen(const uint16_t* p) { return from_bfloat16(p); }
  static void narrow(V v, uint16_t* out) { to_bfloat16(v, out); }
  static V weights(const uint16_t* step, int part, int r) {
    const U pairs = load<U>(step + 2 * r * kLanes);
    return part == 0 ? (V)(pairs << 16) : (V)(pairs & 0xffff0000u);
  }
  static V add(V sum, V weights, const float* x) { return Float32::add(sum, weights, x); }
};

#if defined(__AVX512BF16__)
// The processor's own products of pairs, which it adds to a float.
struct BFloat16Pairs : BFloat16 {
  using Row = uint16_t;
  static constexpr int kParts = 1;
  static constexpr bool kWidens = false, kPairs = true;

  static V weights(const uint16_t* step, int, int r) { return load<V>(step + 2 * r * kLanes); }
  static V add(V sum, V weights, const uint16_t* x) { return add_pairs(sum, weights, x); }
};
#endif

// The numbers of a row of x; its end is zero where the last step has inputs that x lacks.
template <class Type>
int64_t row_size(const PackedLinearParams& p) {
  return (p.in_features + Type::kInputs - 1) / Type::kInputs * Type::kInputs;
}

template <class Type>
int64_t rows_bytes(const PackedLinearParams& p) {
  return p.rows * row_size<Type>(p) * static_cast<int64_t>(sizeof(float));
}

template <class Type>
void read_rows(const PackedLinearParams& p, void* rows) {
  const auto* x = static_cast<const typename Type::Element*>(p.x);
  auto* out = static_cast<float*>(rows);
  const int64_t size = row_size<Type>(p);
  for (int64_t m = 0; m < p.rows; ++m, x += p.in_features, out += size) {
    int64_t k = 0;
    for (; k + kLanes <= p.in_features; k += kLanes) store(out + k, Type::widen(x + k));
    typename Type::Element last[kLanes] = {};
    float wide[kLanes];
    __builtin_memcpy(last, x + k, static_cast<size_t>(p.in_features - k) * sizeof *x);
    store(wide, Type::widen(last));
    __builtin_memcpy(out + k, wide, static_cast<size_t>(size - k) * sizeof *out);
  }
}

// Panels that a thread reads side by side, a block of each in turn: the processor fetches ahead of
// each of them. More rows have less time for it.
constexpr int kPanelsAtOnce = 3;
constexpr int panels_at_once(int64_t rows) { return 3 * rows <= kBlockRows ? kPanelsAtOnce : 2; }

// The next blocks of these panels come into the cache while one is multiplied, an equal part of
// each in every pass: the processor's own prefetching ends with a page and between two passes. They
// come into the second-level cache, since the block that is multiplied fills the first.
struct NextBlocks {
  const char* begin;  // of the part that comes, in the first panel
  int64_t bytes;      // of a part, for each input
  int64_t stride;     // from panel to panel
};

// Adds to `totals` the products of M rows with `inputs` inputs of one panel, at most a block.
template <class Type, int M>
__attribute__((noinline)) void multiply_rows(const typename Type::Row* x, int64_t stride,
                                             const typename Type::Element* w, int64_t inputs,
                                             const NextBlocks& next, V (*totals)[2]) {
  constexpr int kPanels = panels_at_once(M);
  const char* ahead = next.begin;
  const int64_t ahead_step = next.bytes * Type::kInputs;
  V sums[M][2] = {};
  for (int64_t k = 0; k < inputs;) {
    V run[M][2] = {};
    for (const int64_t end = smaller(k + kRun, inputs); k < end; k += Type::kInputs) {
#pragma GCC unroll 3
      for (int i = 0; i < kPanels; ++i) __builtin_prefetch(ahead + i * next.stride, 0, 2);
      ahead += ahead_step;
#pragma GCC unroll 2
      for (int part = 0; part < Type::kParts; ++part) {
        const V w0 = Type::weights(w, part, 0), w1 = Type::weights(w, part, 1);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const auto* inputs_of_row = x + m * stride + k + part;
          run[m][0] = Type::add(run[m][0], w0, inputs_of_row);
          run[m][1] = Type::add(run[m][1], w1, inputs_of_row);
        }
      }
      w += Type::kInputs * kWidth;
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      sums[m][0] += run[m][0];
      sums[m][1] += run[m][1];
    }
  }
#pragma GCC unroll 16  // else the compiler keeps another copy of the sums, in memory
  for (int m = 0; m < M; ++m) {
    totals[m][0] += sums[m][0];
    totals[m][1] += sums[m][1];
  }
}

template <class Type, int M = kBlockRows>
void multiply_up_to(int64_t rows, const typename Type::Row* x, int64_t stride,
                    const typename Type::Element* w, int64_t inputs, const NextBlocks& next,
                    V (*totals)[2]) {
  if (rows == M) return multiply_rows<Type, M>(x, stride, w, inputs, next, totals);
  if constexpr (M > 1) multiply_up_to<Type, M - 1>(rows, x, stride, w, inputs, next, totals);
}

// The same for any number of rows, in passes of equally many, which the registers hold.
template <class Type>
void multiply_block(int64_t rows, int64_t passes, const typename Type::Row* x, int64_t stride,
                    const typename Type::Element* w, int64_t inputs, NextBlocks next,
                    V (*totals)[2]) {
  for (; passes > 0; --passes) {
    const int64_t part = (rows + passes - 1) / passes;
    multiply_up_to<Type>(part, x, stride, w, inputs, next, totals);
    next.begin += inputs * next.bytes;
    x += part * stride;
    totals += part;
    rows -= part;
  }
}

template <class Type>
void widen_block(const typename Type::Element* w, int64_t inputs, float* out) {
  for (int64_t k = 0; k < inputs; k += Type::kInputs, w += Type::kInputs * kWidth) {
    for (int part = 0; part < Type::kParts; ++part, out += kWidth) {
      store(out, Type::weights(w, part, 0));
      store(out + kLanes, Type::weights(w, part, 1));
    }
  }
}

// Rounds the totals of one panel once, with the bias, to y.
template <class Type>
void write_panel(const PackedLinearParams& p, int64_t first, const V (*totals)[2]) {
  using Element = typename Type::Element;
  const int64_t outputs = smaller(kWidth, p.weight.out_features - first);
  const auto bytes = static_cast<size_t>(outputs) * sizeof(Element);
  V bias[2] = {};
  if (p.weight.bias != nullptr) {
    Element lanes[kWidth] = {};
    __builtin_memcpy(lanes, static_cast<const Element*>(p.weight.bias) + first, bytes);
    for (int r = 0; r < 2; ++r) bias[r] = Type::widen(lanes + r * kLanes);
  }
  for (int64_t m = 0; m < p.rows; ++m) {
    Element* const y = static_cast<Element*>(p.y) + m * p.weight.out_features + first;
    Element lanes[kWidth];
    Element* const out = outputs == kWidth ? y : lanes;
    for (int r = 0; r < 2; ++r) {
      const V total = totals[m][r];
      Type::narrow(p.weight.bias == nullptr ? total : total + bias[r], out + r * kLanes);
    }
    if (out != y) __builtin_memcpy(y, lanes, bytes);
  }
}

// Blocks of a row are of one size, so that each fetches the whole of the next.
int64_t block_size(int64_t inputs) {
  const int64_t blocks = (inputs + kBlock - 1) / kBlock;
  return ((inputs + blocks - 1) / blocks + kBlockUnit - 1) / kBlockUnit * kBlockUnit;
}

// Bytes of a panel for so many inputs, whole blocks of them.
template <class Type>
int64_t panel_bytes(const PackedLinearParams& p, int64_t inputs) {
  constexpr BlockFormat kFloats = block_format(WeightFormat::kFloats);
  const BlockFormat block = block_format(p.weight.format);
  if (block.inputs == kFloats.inputs)
    return inputs * kWidth * int64_t{sizeof(typename Type::Element)};
  return inputs / block.inputs * block.bytes() * kWidth;
}

// Rounds the floats of unpacked blocks, in the order of a panel of floats, to the dtype.
template <class Type>
void round_block(float* w, int64_t inputs) {
  for (const float* end = w + inputs * kWidth; w < end; w += kLanes) {
    typename Type::Element rounded[kLanes];
    Type::narrow(load<V>(w), rounded);
    store(w, Type::widen(rounded));
  }
}

// Multiplies the rows by the panels [begin, end), of which `at_once` lie side by side: calls
// multiply_weights(a block of a panel, its first input, inputs, what comes next, the totals of that
// panel), which reads the block in `passes` passes and begins the totals at the first input.
template <class Type, class Multiply>
void multiply_panels(const PackedLinearParams& p, int64_t begin, int64_t end, int64_t at_once,
                     int64_t passes, const Multiply& multiply_weights) {
  const int64_t size = row_size<Type>(p), block = block_size(size);
  const int64_t whole_panel = panel_bytes<Type>(p, size);
  const char* w = static_cast<const char*>(p.weight.panels) + begin * whole_panel;
  V totals[kPanelsAtOnce * kGroupRows][2];
  // Panels side by side are as far apart as the share of each. Those left over come one by one.
  for (; begin < end; at_once = 1) {
    const int64_t share = (end - begin) / at_once, stride = share * whole_panel;
    const int64_t parts = at_once * passes * size;
    const int64_t bytes = (whole_panel + parts - 1) / parts;
    for (const int64_t share_end = begin + share; begin < share_end; ++begin) {
      for (int64_t k = 0; k < size; k += block) {
        const int64_t inputs = smaller(block, size - k), block_bytes = panel_bytes<Type>(p, inputs);
        for (int64_t i = 0; i < at_once; ++i) {
          const NextBlocks next = {w + block_bytes + i * passes * inputs * bytes, bytes,
                                   at_once > 1 ? stride : 64};
          multiply_weights(w + i * stride, k, inputs, next, totals + i * p.rows);
        }
        w += block_bytes;
      }
      for (int64_t i = 0; i < at_once; ++i) {
        write_panel<Type>(p, (begin + i * share) * kWidth, totals + i * p.rows);
      }
    }
    begin += (at_once - 1) * share;
    w += (at_once - 1) * stride;
  }
}

template <class Type>
void multiply(const PackedLinearParams& p, const void* rows, int64_t begin, int64_t end) {
  using Element = typename Type::Element;
  const int64_t size = row_size<Type>(p), passes = (p.rows + kBlockRows - 1) / kBlockRows;
  const BlockKernels& of_blocks = kBlockKernels[static_cast<int>(p.weight.format)];
  const bool widened = Type::kWidens && p.rows > 2 * kBlockRows;
  alignas(64) float wide[kBlock * kWidth];
  const auto multiply_weights = [&](const char* panel, int64_t k, int64_t inputs,
                                    const NextBlocks& next, V(*totals)[2]) {
    if (k == 0) __builtin_memset(totals, 0, static_cast<size_t>(p.rows) * sizeof *totals);
    const auto* x = static_cast<const typename Type::Row*>(rows) + k;
    const auto multiply_as = [&](auto type, const void* weights) {
      using Of = decltype(type);
      multiply_block<Of>(p.rows, passes, x, size, static_cast<const typename Of::Element*>(weights),
                         inputs, next, totals);
    };
    if (of_blocks.unpack != nullptr) {
      if constexpr (sizeof(Element) == 4) {
        if (p.rows <= kFewRows) {
          return of_blocks.multiply[p.rows - 1](x, size, panel, inputs, totals);
        }
      }
      if constexpr (Type::kPairs) {
        if (p.rows <= kFewRowsOfPairs) {
          return of_blocks.multiply_pairs[p.rows - 1](x, size, panel, inputs, totals);
        }
        of_blocks.unpack_pairs(panel, inputs, wide);
        multiply_as(Type(), wide);
      } else {
        of_blocks.unpack(panel, inputs, wide);
        if constexpr (sizeof(Element) == 2) round_block<Type>(wide, inputs);
        multiply_as(Float32(), wide);
      }
    } else if (widened) {
      if constexpr (Type::kWidens) {
        widen_block<Type>(reinterpret_cast<const Element*>(panel), inputs, wide);
        multiply_as(Float32(), wide);
      }
    } else {
      multiply_as(Type(), panel);
    }
  };
  multiply_panels<Type>(p, begin, end, panels_at_once(p.rows), passes, multiply_weights);
}

// float32 rows are read where they are.
int64_t no_bytes(const PackedLinearParams&) { return 0; }

#if defined(__AVX512BF16__)
// Rows of bfloat16 with zeros at the end, up to a multiple of `inputs`.
template <int64_t inputs>
int64_t padded_size(const PackedLinearParams& p) {
  return (p.in_features + inputs - 1) / inputs * inputs;
}

template <int64_t inputs>
int64_t padded_bytes(const PackedLinearParams& p) {
  const int64_t size = padded_size<inputs>(p);
  return size == p.in_features ? 0 : p.rows * size * static_cast<int64_t>(sizeof(uint16_t));
}

template <int64_t inputs>
void pad_rows(const PackedLinearParams& p, void* rows) {
  const auto* x = static_cast<const uint16_t*>(p.x);
  auto* out = static_cast<uint16_t*>(rows);
  const int64_t size = padded_size<inputs>(p);
  __builtin_memset(rows, 0, static_cast<size_t>(padded_bytes<inputs>(p)));
  for (int64_t m = 0; m < p.rows; ++m) {
    __builtin_memcpy(out + m * size, x + m * p.in_features,
                     static_cast<size_t>(p.in_features) * sizeof *x);
  }
}

#if defined(__AMX_BF16__)
// A tile of weights holds kTileInputs inputs of half a panel; one of x as many of up to 16 rows.
constexpr int64_t kTileRows = 16, kTileInputs = kBlockUnit;

// Tiles 0 and 1 are sums of 16 rows, and 2 is their x; 3 to 5 are those of the last rows, which may
// be fewer; 6 and 7 are weights.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileConfig(int64_t last_rows) {
    for (int tile = 0; tile < 8; ++tile) {
      row_bytes[tile] = 64;
      rows[tile] = static_cast<uint8_t>(tile / 3 == 1 ? last_rows : kTileRows);
    }
  }
};

// GCC does not know how much memory the instructions of tiles read.
inline void written(const void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

// The numbers of tiles are part of the instructions.
#define SPECDEC_TILES(Name, sum0, sum1, inputs)               \
  struct Name {                                               \
    static void load_sums(bool first, const V (*totals)[2]) { \
      if (first) {                                            \
        _tile_zero(sum0);                                     \
        _tile_zero(sum1);                                     \
        return;                                               \
      }                                                       \
      _tile_loadd(sum0, &totals[0][0], sizeof *totals);       \
      _tile_loadd(sum1, &totals[0][1], sizeof *totals);       \
    }                                                         \
    static void add(const uint16_t* x, int stride) {          \
      _tile_loadd(inputs, x, stride);                         \
      _tile_dpbf16ps(sum0, inputs, 6);                        \
      _tile_dpbf16ps(sum1, inputs, 7);                        \
    }                                                         \
    static void store_sums(V (*totals)[2]) {                  \
      _tile_stored(sum0, &totals[0][0], sizeof *totals);      \
      _tile_stored(sum1, &totals[0][1], sizeof *totals);      \
    }                                                         \
  };
SPECDEC_TILES(SixteenRows, 0, 1, 2)
SPECDEC_TILES(LastRows, 3, 4, 5)

// Adds the products of a block to the totals of the rows of one tile; the sums go on in the tiles
// from block to block. What a tile reads of x beyond its inputs is zero, and so is what
// `weights_end` holds beyond the last ones. Four tiles of sums, for twice the rows, would read each
// weight half as often, but then fewer lines of x and of the weights wait beside those fetched
// ahead.
template <class Tiles>
void multiply_tile(const uint16_t* x, int64_t size, const uint16_t* w, int64_t inputs,
                   const uint16_t* weights_end, const NextBlocks& next, bool first,
                   V (*totals)[2]) {
  constexpr int kStride = kWidth * 2 * sizeof *w;
  const char* ahead = next.begin;
  const int64_t step = next.stride == 64 ? kPanelsAtOnce * 64 : 64;
  written(w);
  written(weights_end);
  Tiles::load_sums(first, totals);
  for (int64_t k = 0; k < inputs; k += kTileInputs) {
    for (const char* end = ahead + kTileInputs * next.bytes; ahead < end; ahead += step) {
#pragma GCC unroll 3
      for (int i = 0; i < kPanelsAtOnce; ++i) __builtin_prefetch(ahead + i * next.stride, 0, 2);
    }
    const uint16_t* tile = k + kTileInputs <= inputs ? w + k * kWidth : weights_end;
    _tile_loadd(6, tile, kStride);
    _tile_loadd(7, tile + 2 * kLanes, kStride);
    Tiles::add(x + k, static_cast<int>(size * sizeof *x));
  }
  Tiles::store_sums(totals);
}

void multiply_amx(const PackedLinearParams& p, const void* rows, int64_t begin, int64_t end) {
  const int64_t x_size = padded_size<kTileInputs>(p);
  const int64_t passes = (p.rows + kTileRows - 1) / kTileRows;
  const int64_t whole_rows = (passes - 1) * kTileRows;
  const auto unpack = kBlockKernels[static_cast<int>(p.weight.format)].unpack_pairs;
  alignas(64) uint16_t unpacked[kBlock * kWidth];
  uint16_t weights_end[kTileInputs * kWidth] = {};
  const TileConfig config(p.rows - whole_rows);
  written(&config);
  _tile_loadconfig(&config);
  multiply_panels<BFloat16>(
      p, begin, end, kPanelsAtOnce, passes,
      [&](const char* panel, int64_t k, int64_t inputs, NextBlocks next, V(*totals)[2]) {
        const auto* w = reinterpret_cast<const uint16_t*>(panel);
        if (unpack != nullptr) {
          unpack(panel, inputs, unpacked);
          w = unpacked;
        }
        if (const int64_t last = inputs % kTileInputs; last > 0) {
          __builtin_memcpy(weights_end, w + (inputs - last) * kWidth,
                           static_cast<size_t>(last * kWidth) * sizeof *w);
        }
        const auto* x = static_cast<const uint16_t*>(rows) + k;
        for (int64_t m = 0; m < p.rows; m += kTileRows) {
          const auto multiply =
              m < whole_rows ? multiply_tile<SixteenRows> : multiply_tile<LastRows>;
          multiply(x + m * x_size, x_size, w, inputs, weights_end, next, k == 0, totals + m);
          next.begin += inputs * next.bytes;
        }
      });
  _tile_release();
}

constexpr LinearKernel kPairs = {padded_bytes<kTileInputs>, pad_rows<kTileInputs>, multiply_amx};
#else
constexpr LinearKernel kPairs = {padded_bytes<2>, pad_rows<2>, multiply<BFloat16Pairs>};
#endif
#endif

template <class Type>
constexpr LinearKernel kernel_of() {
  return {rows_bytes<Type>, read_rows<Type>, multiply<Type>};
}

}  // namespace

extern const LinearKernels SPECDEC_CAT(linear_kernels_, SPECDEC_ISA);
const LinearKernels SPECDEC_CAT(linear_kernels_, SPECDEC_ISA) = {
    kWidth,
    [](WeightFormat format) { return kBlockKernels[static_cast<int>(format)].unpack; },
    {{no_bytes, nullptr, multiply<Float32>},
#if defined(__AVX512BF16__)
     kPairs,
#else
     kernel_of<BFloat16>(),
#endif
     kernel_of<Float16>()},
};

}  // namespace specdec::cpu
