#pragma once
// Q, the draft distribution of one token, mapped to the target's vocabulary from any form of draft.
#include "cuda/row/distribution.cuh"
#include "specdec/draft.h"

namespace specdec::cuda {

// The column of a token in a draft row, -1 if it has none.
inline __device__ int64_t column_of(const int32_t* columns, int64_t size, int64_t token) {
  const int64_t column = columns != nullptr ? columns[token] : token;
  return column >= 0 && column < size ? column : -1;
}

struct DraftDistribution {
  DraftForm form;
  bool invalid_at_token;  // the row is not valid, or its entry of the drafted token
  bool probs;             // the row holds probabilities
  bool row_checked;       // the whole row is known to be valid
  bool ids_are_int64;
  int64_t token;  // the drafted token
  double q_x;     // Q(x) of the drafted token; log_q_x is exact where q_x underflows
  double log_q_x;
  RowView row;                 // of rows and sampled; the probabilities of sparse
  WeightParams weight_params;  // of logits
  float scale;                 // makes the weights sum to 1
  const int32_t* columns;      // of each token; null if the column is the token
  const void* ids;             // sparse: ids of this row

  // Whether Q lists its tokens instead of having a row as long as the vocabulary.
  __device__ bool lists_tokens() const {
    return form == DraftForm::kOneHot || form == DraftForm::kSparse;
  }
  // Whether the row must be measured before a token can be looked up.
  __device__ bool unmeasured() const {
    return form == DraftForm::kRows && !probs && !invalid_at_token && !row_checked;
  }
  // Whether a lane holds the same entries of a warp tile of this row as of the target's.
  __device__ bool pairs(bool wide) const {
    return !lists_tokens() && columns == nullptr && row.wide() == wide;
  }
  __device__ int64_t id(int64_t k) const { return Integers{ids, ids_are_int64}[k]; }
  // A number proportional to Q, and what it must be multiplied by.
  __device__ float weight(float value) const { return probs ? value : weight_params.weight(value); }
  __device__ float weight_scale() const { return probs ? 1.0f : scale; }
  // Turns entries of the row into weights; returns the largest entry, NaN if one is.
  __device__ float weigh_all(float (&values)[kPerLane]) const {
    float top = values[0];
#pragma unroll
    for (int j = 1; j < kPerLane; ++j) top = max_or_nan(top, values[j]);
    if (!probs) weigh(values, weight_params);
    return top;
  }
  // Turns entries of the row into Q; returns the same.
  __device__ float normalise_all(float (&values)[kPerLane]) const {
    const float top = weigh_all(values);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) values[j] *= weight_scale();
    return top;
  }

  // `known`: the token's entry of the row, if it was read before.
  __device__ void look_up(const RowStats& stats, const float* known = nullptr) {
    const int64_t column = column_of(columns, row.vocab, token);
    const bool inside = column >= 0;
    const float value = known != nullptr ? *known : inside ? at(row, column) : 0;
    invalid_at_token |= inside && !(value < INFINITY);
    if (probs) {
      q_x = value + 0.0f;  // -0 becomes 0: P / -0 would be -inf
      log_q_x = log_of(q_x);
    } else {
      log_q_x = inside ? stats.logprob(value) : -INFINITY;
      q_x = exp_of(log_q_x);
    }
  }

  // Sets the statistics of logits and looks up the drafted token.
  __device__ void set(const RowStats& stats, const float* known = nullptr) {
    invalid_at_token |= !stats.valid;
    weight_params = {stats.max, rate_of(stats.inv_t), stats.threshold};
    scale = static_cast<float>(exp_of(-stats.log_sum));
    if (!invalid_at_token) look_up(stats, known);
  }
};

// The index of a row may be data.
inline __device__ bool has_row(const DraftParams& source, int64_t row) {
  return row >= 0 && row < source.num_rows;
}

inline __device__ RowView row_of(const DraftParams& source, int64_t b, int64_t row, Read read) {
  return RowView(source.rows, source.flat ? 0 : b, row, source.vocab, read);
}

// Looks up the drafted token in a sparse draft, where equal ids add up, and checks all its
// probabilities. For one thread.
inline __device__ void look_up_sparse(DraftDistribution& d) {
  double mass = 0;
#pragma unroll 4
  for (int64_t k = 0; k < d.row.vocab; ++k) {
    const int64_t id = d.id(k);
    const float value = at(d.row, k);
    d.invalid_at_token |= id >= 0 && !(value < INFINITY);
    if (id == d.token) mass += static_cast<double>(value);
  }
  d.q_x = mass;
  d.log_q_x = log_of(mass);
}

// Opens row `row` of sequence b, or of all sequences if the source is flat, and looks up the
// drafted token x; but rows of logits must be measured first. `statistic` is the index of the row
// in source.logsumexp and source.threshold. For one thread.
inline __device__ void open_draft(const DraftParams& source, int64_t b, int64_t row,
                                  int64_t statistic, int64_t x, float temperature,
                                  DraftDistribution& d) {
  d = {};
  d.form = temperature == 0 ? DraftForm::kOneHot : source.form;
  d.token = x;
  d.q_x = 1;
  if (d.form == DraftForm::kOneHot) return;
  d.invalid_at_token = !has_row(source, row);
  if (d.invalid_at_token) return;
  d.probs =
      d.form == DraftForm::kSparse || (d.form == DraftForm::kRows && source.kind == Kind::kProbs);
  d.row = row_of(source, b, row, d.probs ? Read::kProbs : Read::kLogits);
  d.columns = source.columns;
  if (d.form == DraftForm::kSparse) {
    const int64_t at_row = source.place(b, row);
    d.ids_are_int64 = source.ids_are_int64;
    d.ids =
        static_cast<const char*>(source.ids) + at_row * source.vocab * (d.ids_are_int64 ? 8 : 4);
    look_up_sparse(d);
  } else if (d.probs) {
    d.look_up({});
  } else if (d.form == DraftForm::kSampled) {
    RowStats stats = {};
    set_sampled_stats(source, statistic, temperature, stats);
    d.set(stats);
  }
}

// Subtracts `factor` times Q from values, where q holds the draft's entries of the same tokens.
// Returns false in some lane if one of them is not valid.
inline __device__ bool subtract_entries(const DraftDistribution& d, float factor,
                                        float (&q)[kPerLane], float (&values)[kPerLane]) {
  const float weight_factor = d.weight_scale() * factor;
  const float top = d.weigh_all(q);
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) values[j] = __fmaf_rn(q[j], -weight_factor, values[j]);
  return top < INFINITY;
}

// Subtracts `factor` times Q over a warp tile of `vocab` target tokens from values that are spread
// over the lanes as a row of the target's dtype is. The draft lists its tokens.
inline __device__ void subtract_listed(const DraftDistribution& d, float factor, int64_t vocab,
                                       bool wide, int64_t warp_tile, float (&values)[kPerLane]) {
  const int64_t begin = warp_tile * kWarpTile;
  const int64_t n = d.form == DraftForm::kOneHot ? 1 : d.row.vocab;
  for (int64_t k = 0; k < n; ++k) {
    const int64_t index = (n == 1 && d.ids == nullptr ? d.token : d.id(k)) - begin;
    if (index < 0 || index >= kWarpTile || index + begin >= vocab) continue;
    if (holder(wide, static_cast<int>(index)) != lane_id()) continue;
    const int mine = element(wide, static_cast<int>(index));
    const float q = (d.ids == nullptr ? 1.0f : at(d.row, k)) * factor;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) values[j] -= j == mine ? q : 0.0f;
  }
}

// The same for a draft whose columns are mapped, or spread over the lanes in another way: they are
// read one at a time. Returns false in some lane if what was read is not valid.
inline __device__ bool subtract_columns(const DraftDistribution& d, float factor, int64_t vocab,
                                        bool wide, int64_t warp_tile, float (&values)[kPerLane]) {
  const int64_t begin = warp_tile * kWarpTile;
  const float weight_factor = d.weight_scale() * factor;
  float top = -INFINITY;
#pragma unroll 1
  for (int quad = 0; quad < kQuads; ++quad) {
    const int64_t token = begin + first_of_quad(wide, quad);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int64_t column = token + j;
      if (column >= vocab) {
        column = -1;
      } else if (d.columns != nullptr) {
        column = d.columns[column];
      }
      if (column >= 0 && column < d.row.vocab) {
        const float q = at(d.row, column);
        top = max_or_nan(top, q);
        values[j] = __fmaf_rn(d.weight(q), -weight_factor, values[j]);
      }
    }
    rotate(values);
  }
  return top < INFINITY;
}

// The same for any draft, whose entries were loaded if its row pairs with the target's.
inline __device__ bool subtract_draft(const DraftDistribution& d, float factor, int64_t vocab,
                                      bool wide, int64_t warp_tile, const Packed& loaded,
                                      float (&values)[kPerLane]) {
  if (d.lists_tokens()) {
    subtract_listed(d, factor, vocab, wide, warp_tile, values);
    return true;
  }
  if (!d.pairs(wide)) return subtract_columns(d, factor, vocab, wide, warp_tile, values);
  float q[kPerLane];
  unpack(d.row, warp_tile, loaded, q);
  return subtract_entries(d, factor, q, values);
}

// The same for a single token.
inline __device__ float subtract_at(const DraftDistribution& d, float factor, int64_t token,
                                    float value) {
  if (d.form == DraftForm::kOneHot) return token == d.token ? value - factor : value;
  if (d.form == DraftForm::kSparse) {
    for (int64_t k = 0; k < d.row.vocab; ++k) {
      if (d.id(k) == token) value -= at(d.row, k) * factor;
    }
    return value;
  }
  const int64_t column = column_of(d.columns, d.row.vocab, token);
  if (column < 0) return value;
  return __fmaf_rn(d.weight(at(d.row, column)), -(d.weight_scale() * factor), value);
}

}  // namespace specdec::cuda
