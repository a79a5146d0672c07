#pragma once
// The draft's conditional Q of one row, on the target's vocabulary, whatever form it came in.
#include "cpu/row/distribution.h"
#include "specdec/draft.h"

namespace specdec::cpu {

struct DraftDistribution {
  bool fault = false;  // seen where a token was looked up
  double q_x = 1;      // of that token; its logarithm is exact where q_x underflows
  double log_q_x = 0;

  // Q at another token: fault, q_x and log_q_x.
  void look_up(int64_t x);
  // Probabilities of the tokens [begin, begin + n), n <= kTile. False if what was read is no law.
  bool weights(int64_t begin, int64_t n, float* out) const;
  // The same of scattered tokens, of a row known to be valid.
  void weights_of(const int32_t* ids, int64_t n, float* out) const;
  bool whole_row_valid(const Parallel& parallel) const;
  // Whether the columns that no token has are valid; their mass is added to `beyond`, that of the
  // tokens of `without` left out.
  bool rest(int64_t vocab, double& beyond, const std::vector<int64_t>& without = {}) const;
  // No row of the vocabulary's size.
  bool few() const { return form == DraftForm::kOneHot || form == DraftForm::kSparse; }

  // Which law; fields of other forms are unused.
  DraftForm form = DraftForm::kOneHot;
  bool broken = false;           // no law, whatever the token
  int64_t token = -1;            // point mass
  RowView row;                   // rows, sampled; probabilities of a sparse law
  RowStats stats;                // of logits
  WeightParams weight_params{};  // the same
  bool probs = false;            // the row holds probabilities
  bool checked = false;          // the whole row is known to be finite
  const int32_t* columns = nullptr;
  const void* ids = nullptr;  // sparse, at this row
  bool ids_are_int64 = false;

  int64_t id(int64_t k) const { return id_at(ids, ids_are_int64, k); }
  // Probability of a token of a sparse law: ids that come twice add up.
  double mass(int64_t token) const;
  // f(token) for what few tokens hold, as often as a token stands there.
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

// Q at the drafted token x: row `row` of sequence b, or of all when the source is flat; `statistic`
// is where what `sample` left behind of that row stands.
DraftDistribution draft_distribution(const DraftSource& source, int64_t b, int64_t row,
                                     int64_t statistic, int64_t x, float temperature,
                                     const Parallel& parallel, Scratch& scratch);

}  // namespace specdec::cpu
