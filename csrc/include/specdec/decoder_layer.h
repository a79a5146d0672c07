#pragma once
// Decoder layers for few rows, and the two halves of one: what comes before the cache and what
// comes after attention. Each intermediate result is rounded to the dtype where a model's own
// forward rounds it.
#include "specdec/kv.h"
#include "specdec/linear.h"

namespace specdec {

// RMSNorm, the projections to queries, keys and values, and rotary position embeddings.
struct NormQkvRopeParams {
  const void* x;              // [rows, hidden], in parts that are normalised each on its own
  const void* norm;           // [hidden]
  PackedWeight qkv[3];        // hidden to [heads * head_size]
  const void* head_norms[2];  // [head_size] of queries and of keys, may be null
  const void *cos, *sin;      // [rows, head_size] or, for all sequences, [row_period, head_size]
  void* outputs[3];           // [rows, heads * head_size]
  DType dtype;                // of all
  int64_t rows, hidden, parts, head_size, row_period;
  float epsilon;
};

// The output projection, the residual, RMSNorm, and a gated feed-forward network with its residual.
struct OutputNormMlpParams {
  const void* attended;  // [rows, attended_size]
  const void* residual;  // [rows, hidden]
  const void* norm;      // [hidden]
  PackedWeight output;   // attended_size to hidden
  PackedWeight gate, up, down;
  void* y;      // [rows, hidden]
  DType dtype;  // of all
  int64_t rows, attended_size, hidden;
  float epsilon;
};

struct RmsNormParams {
  const void *x, *weight;  // [rows, hidden], [hidden]
  void* y;
  DType dtype;  // of all
  int64_t rows, hidden;
  float epsilon;
};

struct DecoderLayerWeights {
  const void* norms[2];       // before attention, and before the gated network
  PackedWeight qkv[3];        // as NormQkvRopeParams
  const void* head_norms[2];  // as NormQkvRopeParams
  PackedWeight output, gate, up, down;
};

// Layers one after another, each with attention over its cache.
struct DecoderLayersParams {
  const DecoderLayerWeights* layers;
  const KvTensor*
      caches;  // keys and values of each layer, with heads of `head_size` and no entries
  int64_t num_layers;
  const void* x;                   // [batch, tokens, input], in parts of `hidden`
  const void* residual;            // [batch, tokens, hidden], what the first layer adds to
  const void *cos, *sin;           // as NormQkvRopeParams
  KvVector<const void> positions;  // the slots of the first tokens
  const uint8_t* mask;             // [batch, tokens, slots], contiguous in the slots
  int64_t mask_stride_sequence, mask_stride_token;
  void* y;      // [batch, tokens, hidden] after the last layer; or after each, where every_layer
  DType dtype;  // of all but the mask
  int64_t batch, tokens, input, hidden, head_size, row_period, slots;
  float scale, epsilon;
  bool every_layer;
};

namespace cpu {
void decoder_layers(const DecoderLayersParams& p, const Parallel& threads);
void rms_norm(const RmsNormParams& p);
void norm_qkv_rope(const NormQkvRopeParams& p, const Parallel& threads);
void output_norm_mlp(const OutputNormMlpParams& p, const Parallel& threads);
}  // namespace cpu

}  // namespace specdec
