#pragma once
// Q, the distribution that one token was drafted from, on the target's vocabulary and whatever form
// it came in.
#include "cpu/row/distribution.h"
#include "specdec/draft.h"

namespace specdec::cpu {

struct DraftDistribution {
  bool fault = false;  // the row is not valid, as far as the looked-up token shows
  double q_x = 1;      // Q(x) of the looked-up token; log_q_x is exact where q_x underflows
  double log_q_x = 0;

  // Sets fault, q_x and log_q_x for another token.
  void look_up(int64_t x);
  // Probabilities of the tokens [begin, begin + n), n <= kTile. Returns false if what
  // was read is not valid.
  bool weights(int64_t begin, int64_t n, float* out) const;
  // Probabilities of scattered tokens, from a row known to be valid.
  void weights_of(const int32_t* ids, int64_t n, float* out) const;
  bool whole_row_valid(const Parallel& parallel) const;
  // Reads the columns beyond the target's vocabulary and adds their mass to `beyond`, except that
  // of the tokens in `without`. Returns false if they are not valid.
  bool rest(int64_t vocab, double& beyond, const std::vector<int64_t>& without = {}) const;
  // Q lists its tokens instead of having a row as long as the vocabulary.
  bool few() const { return form == DraftForm::kOneHot || form == DraftForm::kSparse; }

  // Each form uses some of the following.
  DraftForm form = DraftForm::kOneHot;
  bool broken = false;           // not valid, whatever the token
  int64_t token = -1;            // one-hot: where all mass is
  RowView row;                   // of rows and sampled; the probabilities of sparse
  RowStats stats;                // of rows and sampled logits
  WeightParams weight_params{};  // the same
  bool probs = false;            // the row holds probabilities
  bool checked = false;          // the whole row is known to be valid
  const int32_t* columns = nullptr;
  const void* ids = nullptr;  // sparse: ids of this row
  bool ids_are_int64 = false;

  int64_t id(int64_t k) const { return id_at(ids, ids_are_int64, k); }
  // Probability of a token in the sparse form, where equal ids add up.
  double mass(int64_t token) const;
  // Calls f(token) for each listed token, again for each repetition.
  template <class F>
  void each_token(F&& f) const {
    if (form == DraftForm::kOneHot) return f(token);
    for (int64_t k = 0; k < row.vocab(); ++k) {
      if (id(k) >= 0) f(id(k));
    }
  }
};

bool holds(const std::vector<int64_t>& tokens, int64_t x);

// Zeroes out[x - begin] of the tokens that lie in [begin, begin + n).
void clear(const std::vector<int64_t>& tokens, int64_t begin, int64_t n, float* out);

// Opens row `row` of sequence b, or of all sequences if the source is flat, and looks up the
// drafted token x. `statistic` is the index of the row in source.logsumexp and source.threshold.
DraftDistribution draft_distribution(const DraftParams& source, int64_t b, int64_t row,
                                     int64_t statistic, int64_t x, float temperature,
                                     const Parallel& parallel, Scratch& scratch);

}  // namespace specdec::cpu
