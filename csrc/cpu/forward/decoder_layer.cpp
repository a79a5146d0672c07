#include "specdec/decoder_layer.h"

#include <algorithm>

#include "cpu/capability.h"
#include "cpu/forward/decoder_layer_tile.h"
#include "cpu/forward/linear.h"
#include "specdec/attention.h"

namespace specdec::cpu {

extern const DecoderLayerKernels decoder_layer_kernels_plain;
#ifdef __x86_64__
extern const DecoderLayerKernels decoder_layer_kernels_avx2;
extern const DecoderLayerKernels decoder_layer_kernels_avx512;
#endif

namespace {

const DecoderLayerKernels& decoder_layer_kernels() {
#ifdef __x86_64__
  switch (capability()) {
    case Capability::kAmxBf16:
    case Capability::kAvx512Bf16:
    case Capability::kAvx512:
      return decoder_layer_kernels_avx512;
    case Capability::kAvx2:
      return decoder_layer_kernels_avx2;
    case Capability::kPlain:
      break;
  }
#endif
  return decoder_layer_kernels_plain;
}

// Fewer numbers are not worth waking a thread.
constexpr int64_t kWorthwhileNumbers = 1 << 15;

// Rows of one dtype in memory, with the kernels for them.
class Rows {
 public:
  Rows(DType dtype, int64_t rows, const Parallel& threads)
      : type_(static_cast<int>(dtype)),
        bytes_(dtype == DType::kFloat32 ? 4 : 2),
        rows_(rows),
        threads_(threads) {}

  std::unique_ptr<char[]> scratch(int64_t size) const {
    return std::unique_ptr<char[]>(new char[static_cast<size_t>(rows_ * size * bytes_)]);
  }
  char* at(void* data, int64_t number) const { return static_cast<char*>(data) + number * bytes_; }
  const char* at(const void* data, int64_t number) const {
    return static_cast<const char*>(data) + number * bytes_;
  }

  // Calls f(row) for every row, of `numbers` each.
  template <class F>
  void each(int64_t numbers, F&& f) const {
    const Parallel parallel = rows_ * numbers >= kWorthwhileNumbers ? threads_ : serial();
    parallel(rows_, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) f(row);
    });
  }
  // Each of the parts of a row on its own.
  void normalise(const void* x, const void* weight, void* y, int64_t numbers, float epsilon,
                 int64_t parts = 1) const {
    const int64_t size = numbers / parts;
    each(numbers, [&](int64_t row) {
      for (int64_t k = 0; k < numbers; k += size) {
        const int64_t i = row * numbers + k;
        kernels_.normalise[type_](at(x, i), at(weight, k), at(y, i), size, epsilon);
      }
    });
  }
  void rotate(void* x, int64_t heads, int64_t size, const NormQkvRopeParams& p) const {
    each(heads * size, [&](int64_t row) {
      const int64_t place = row % p.row_period * size;
      kernels_.rotate[type_](at(x, row * heads * size), heads, size, at(p.cos, place),
                             at(p.sin, place));
    });
  }
  // Columns [begin, end) of every row of [rows, size].
  void gate(void* gate, const void* up, int64_t size, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < rows_ * size; i += size) {
      kernels_.gate[type_](at(gate, i), at(up, i), end - begin);
    }
  }
  void add(void* y, const void* x, int64_t size, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < rows_ * size; i += size) {
      kernels_.add[type_](at(y, i), at(x, i), end - begin);
    }
  }

 private:
  const DecoderLayerKernels& kernels_ = decoder_layer_kernels();
  int type_;
  int64_t bytes_, rows_;
  Parallel threads_;
};

// y = residual + the product with a weight; a thread adds to what it has multiplied.
void add_product(const Rows& rows, const LinearInput& input, const PackedWeight& weight,
                 const void* residual, void* y, const Parallel& parallel) {
  const int64_t size = weight.out_features, share = input.share();
  parallel(input.shares(size), [&](int64_t begin, int64_t end) {
    input.multiply(weight, y, begin, end);
    rows.add(y, residual, size, begin * share, std::min(end * share, size));
  });
}

// The input of one of several layers, [rows, input], and its output.
struct LayerRows {
  const void *x, *residual;
  void* y;
  int64_t input;
};

AttentionStrides in_elements(const KvStrides& bytes, int64_t size) {
  return {bytes.sequence / size, bytes.head / size, bytes.slot / size};
}

// Writes the keys and values of a layer, and its output; y may be x or the residual.
void run_layer(const DecoderLayersParams& p, int64_t layer, const LayerRows& io, char* scratch,
               const Parallel& threads) {
  const DecoderLayerWeights& w = p.layers[layer];
  const int64_t rows = p.batch * p.tokens, bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t wide = w.qkv[0].out_features, narrow = w.qkv[1].out_features;
  // Queries, keys, values and what attention makes of them, [batch, tokens, heads, head_size] each.
  char* const query = scratch;
  char* const key = query + rows * wide * bytes;
  char* const value = key + rows * narrow * bytes;
  char* const attended = value + rows * narrow * bytes;
  NormQkvRopeParams before = {};
  before.x = io.x;
  before.norm = w.norms[0];
  before.cos = p.cos;
  before.sin = p.sin;
  for (int i = 0; i < 3; ++i) before.qkv[i] = w.qkv[i];
  for (int i = 0; i < 2; ++i) before.head_norms[i] = w.head_norms[i];
  before.outputs[0] = query;
  before.outputs[1] = key;
  before.outputs[2] = value;
  before.dtype = p.dtype;
  before.rows = rows;
  before.hidden = io.input;
  before.parts = io.input / p.hidden;
  before.head_size = p.head_size;
  before.row_period = p.row_period;
  before.epsilon = p.epsilon;
  norm_qkv_rope(before, threads);

  KvTensor entries[] = {p.caches[2 * layer], p.caches[2 * layer + 1]};
  const char* const made[] = {key, value};
  const int64_t token_bytes = narrow * bytes;
  for (int i = 0; i < 2; ++i) {
    entries[i].entries = made[i];
    entries[i].entry_stride = {p.tokens * token_bytes, entries[i].entry_bytes, token_bytes};
    entries[i].count = p.tokens;
  }
  if (entries[0].slots > 0) kv_append({entries, 2, p.batch, p.positions}, threads);

  CachedAttentionParams attention = {};
  attention.query = query;
  attention.keys = entries[0].cache;
  attention.values = entries[1].cache;
  attention.mask = p.mask;
  attention.out = attended;
  attention.dtype = p.dtype;
  attention.batch = p.batch;
  attention.heads = wide / p.head_size;
  attention.kv_heads = narrow / p.head_size;
  attention.queries = p.tokens;
  attention.slots = p.slots;
  attention.size = attention.value_size = p.head_size;
  attention.query_strides = {p.tokens * wide, p.head_size, wide};
  attention.key_strides = in_elements(entries[0].cache_stride, bytes);
  attention.value_strides = in_elements(entries[1].cache_stride, bytes);
  attention.mask_stride_sequence = p.mask_stride_sequence;
  attention.mask_stride_query = p.mask_stride_token;
  attention.scale = p.scale;
  cached_attention(attention, threads);

  output_norm_mlp({attended, io.residual, w.norms[1], w.output, w.gate, w.up, w.down, io.y, p.dtype,
                   rows, wide, p.hidden, p.epsilon},
                  threads);
}

}  // namespace

void decoder_layers(const DecoderLayersParams& p, const Parallel& threads) {
  const int64_t rows = p.batch * p.tokens, bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  if (rows == 0) return;
  int64_t widest = 0;
  for (int64_t i = 0; i < p.num_layers; ++i) {
    const PackedWeight* const qkv = p.layers[i].qkv;
    widest = std::max(widest, qkv[0].out_features + qkv[1].out_features);
  }
  const std::unique_ptr<char[]> scratch(new char[static_cast<size_t>(2 * rows * widest * bytes)]);
  LayerRows io = {p.x, p.residual, p.y, p.input};
  for (int64_t i = 0; i < p.num_layers; ++i) {
    run_layer(p, i, io, scratch.get(), threads);
    io.x = io.residual = io.y;
    io.input = p.hidden;
    if (p.every_layer) io.y = static_cast<char*>(io.y) + rows * p.hidden * bytes;
  }
}

void rms_norm(const RmsNormParams& p) {
  Rows(p.dtype, p.rows, serial()).normalise(p.x, p.weight, p.y, p.hidden, p.epsilon);
}

void norm_qkv_rope(const NormQkvRopeParams& p, const Parallel& threads) {
  if (p.rows == 0) return;
  int64_t outputs = 0, shares = 0;
  for (const PackedWeight& weight : p.qkv) outputs += weight.out_features;
  const Parallel parallel = worth_threads(threads, p.dtype, p.rows, outputs * p.hidden);
  const Rows rows(p.dtype, p.rows, threads);
  const auto normed = rows.scratch(p.hidden);
  rows.normalise(p.x, p.norm, normed.get(), p.hidden, p.epsilon, p.parts);

  const LinearInput input(normed.get(), p.dtype, p.rows, p.hidden, parallel);
  for (const PackedWeight& weight : p.qkv) shares += input.shares(weight.out_features);
  // The weights as one: a thread takes the same part of all their outputs.
  parallel(shares, [&](int64_t begin, int64_t end) {
    for (int i = 0; i < 3; ++i) {
      const int64_t own = input.shares(p.qkv[i].out_features);
      const int64_t from = std::max<int64_t>(begin, 0), to = std::min(end, own);
      if (from < to) input.multiply(p.qkv[i], p.outputs[i], from, to);
      begin -= own;
      end -= own;
    }
  });
  for (int i = 0; i < 2; ++i) {
    const int64_t heads = p.qkv[i].out_features / p.head_size;
    if (p.head_norms[i] != nullptr) {
      const Rows of_heads(p.dtype, p.rows * heads, threads);
      of_heads.normalise(p.outputs[i], p.head_norms[i], p.outputs[i], p.head_size, p.epsilon);
    }
    rows.rotate(p.outputs[i], heads, p.head_size, p);
  }
}

void output_norm_mlp(const OutputNormMlpParams& p, const Parallel& threads) {
  if (p.rows == 0) return;
  const Rows rows(p.dtype, p.rows, threads);
  const int64_t size = p.gate.out_features;
  const auto attended = rows.scratch(p.hidden), normed = rows.scratch(p.hidden);
  const auto gated = rows.scratch(size), up = rows.scratch(size);
  const auto worth = [&](int64_t weights) {
    return worth_threads(threads, p.dtype, p.rows, weights);
  };
  {
    const Parallel parallel = worth(p.attended_size * p.hidden);
    const LinearInput input(p.attended, p.dtype, p.rows, p.attended_size, parallel);
    add_product(rows, input, p.output, p.residual, attended.get(), parallel);
  }
  rows.normalise(attended.get(), p.norm, normed.get(), p.hidden, p.epsilon);
  const Parallel parallel = worth(size * p.hidden);
  {
    const LinearInput input(normed.get(), p.dtype, p.rows, p.hidden, parallel);
    const int64_t share = input.share();
    parallel(input.shares(size), [&](int64_t begin, int64_t end) {
      input.multiply(p.gate, gated.get(), begin, end);
      input.multiply(p.up, up.get(), begin, end);
      rows.gate(gated.get(), up.get(), size, begin * share, std::min(end * share, size));
    });
  }
  const LinearInput input(gated.get(), p.dtype, p.rows, size, parallel);
  add_product(rows, input, p.down, attended.get(), p.y, parallel);
}

}  // namespace specdec::cpu
