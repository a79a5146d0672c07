#pragma once
// Q, the draft distribution of one token, mapped to the target's vocabulary from any form of draft.
#include "cpu/row/distribution.h"
#include "specdec/draft.h"

namespace specdec::cpu {

struct DraftDistribution {
  // The row is not valid: no row of this draft, or the entry of the looked-up token.
  bool invalid_at_token = false;
  double q_x = 1;  // Q(x) of the looked-up token; log_q_x is exact where q_x underflows
  double log_q_x = 0;

  // Sets the fields above for another token.
  void look_up(int64_t x);
  // Probabilities of the tokens [begin, begin + n), n <= kTile. Returns false if an entry that was
  // read is not valid.
  bool weights(int64_t begin, int64_t n, float* out) const;
  // Probabilities of scattered tokens, from a row known to be valid.
  void weights_of(const int32_t* ids, int64_t n, float* out) const;
  bool whole_row_valid(const Parallel& parallel) const;
  // Adds to `mass_beyond` the mass of Q beyond the target's vocabulary, except that of the tokens
  // in `without`. Returns false if an entry there is not valid.
  bool add_mass_beyond(int64_t vocab, double& mass_beyond,
                       const std::vector<int64_t>& without = {}) const;
  // Whether Q lists its tokens instead of having a row as long as the vocabulary.
  bool lists_tokens() const { return form == DraftForm::kOneHot || form == DraftForm::kSparse; }

  // Each form uses some of the following.
  DraftForm form = DraftForm::kOneHot;
  bool row_invalid = false;      // not valid, whatever the token
  int64_t token = -1;            // one-hot: where all mass is
  RowView row;                   // of rows and sampled; the probabilities of sparse
  RowStats stats;                // of rows and sampled logits
  WeightParams weight_params{};  // the same
  bool probs = false;            // the row holds probabilities
  bool row_checked = false;      // the whole row is known to be valid
  const int32_t* columns = nullptr;
  const void* ids = nullptr;  // sparse: ids of this row
  bool ids_are_int64 = false;

  int64_t id(int64_t k) const { return Integers{ids, ids_are_int64}[k]; }
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

bool contains(const std::vector<int64_t>& tokens, int64_t x);

// Zeroes out[x - begin] of the tokens that lie in [begin, begin + n).
void zero_out(const std::vector<int64_t>& tokens, int64_t begin, int64_t n, float* out);

// Opens row `row` of sequence b, or of all sequences if the source is flat, and looks up the
// drafted token x. `statistic` is the index of the row in source.logsumexp and source.threshold.
DraftDistribution draft_distribution(const DraftParams& source, int64_t b, int64_t row,
                                     int64_t statistic, int64_t x, float temperature,
                                     const Parallel& parallel, Scratch& scratch);

}  // namespace specdec::cpu
