#pragma once
// One row, a vector of V logits or probabilities: its statistics under the sampling parameters of
// its sequence, and draws from the distribution that they describe.
//   row statistics  maximum, threshold and sum of exponentials: with them an entry of the row gives
//                   its probability, so that the row is never copied or normalised
//   survivors       the tokens that top-k, top-p and min-p leave
//   valid           said of a row that holds a distribution
//   one-hot         said of a distribution with all mass on one token (temperature 0)
//   direct          said of a row whose entries are the probabilities, used as they are
#include <memory>
#include <vector>

#include "cpu/row/tile.h"
#include "specdec/parallel.h"
#include "specdec/philox.h"
#include "specdec/sampling.h"
#include "specdec/sequence_params.h"

namespace specdec::cpu {

// V elements, read tile by tile as floats.
class RowView {
 public:
  RowView() = default;
  RowView(const Rows& rows, int64_t sequence, int64_t row, int64_t vocab,
          Read read = Read::kLogits);
  int64_t vocab() const { return vocab_; }
  int64_t tiles() const { return (vocab_ + kTile - 1) / kTile; }
  int64_t tile_size(int64_t t) const;
  // The tile itself, or its conversion in scratch [kTile].
  const float* tile(int64_t t, float* scratch) const;
  float at(int64_t index) const;
  // Elements [begin, begin + n), n <= kTile; in scratch [kTile] if they need conversion.
  const float* read(int64_t begin, int64_t n, float* scratch) const;
  // out[j] = element columns[j], or `rest` where the row has no such column.
  void gather(const int32_t* columns, int64_t n, float rest, float* out) const;

 private:
  const float* convert(int64_t begin, int64_t n, float* scratch) const;

  const void* data_ = nullptr;
  const uint32_t* allowed_ = nullptr;
  int64_t vocab_ = 0;
  DType dtype_ = DType::kFloat32;
  Read read_ = Read::kLogits;
};

struct RowStats {
  bool valid = false;
  bool one_hot = false;  // all mass on argmax
  bool direct = false;   // entries are probabilities: the other fields but `valid` are not used
  bool listed = false;   // scratch.survivors holds every token with mass
  int64_t argmax = -1;   // only if one-hot
  float max = 0;
  float inv_t = 1;
  float threshold = 0;  // in raw logits
  double log_sum = 0;   // logarithm of the sum of exp((l - max) * inv_t) over the survivors

  double logprob(const RowView& row, int64_t index) const;
  // Scaled so that the weights sum to 1.
  WeightParams weight_params() const;
};

// The survivors of a row, by ascending id.
struct Survivors {
  int64_t count;
  float values[kTile];
  int32_t ids[kTile];
};

// Reused from row to row. These O(tiles) floats and a few tiles are all that an op allocates.
struct Scratch {
  std::vector<float> sums;               // [tiles], of the last row measured or summed
  std::vector<float> maxima;             // [tiles]
  std::vector<float> strip_maxima;       // [V / kStrip], only with filters
  std::vector<float> strip_weights;      // the same, only with top-p
  std::unique_ptr<Survivors> survivors;  // only with filters
  std::unique_ptr<Histogram> histogram;  // only if the survivors are too many to list
};

// Reads the row once, and again if more than a tile of it survives the filters. Fills
// scratch.survivors, or else scratch.sums, which are relative to the weight of the maximum. A row
// that `filter` is to be called for again needs `strips`.
RowStats measure(const RowView& row, const SequenceParams& params, const Parallel& parallel,
                 Scratch& scratch, bool strips = false);

// For a direct row: fills scratch.sums and checks that every entry is a probability.
RowStats measure_direct(const RowView& row, const Parallel& parallel, Scratch& scratch);

// -sum P log P over the survivors; reuses the memory of `sums`.
double entropy(const RowView& row, const RowStats& stats, const Parallel& parallel,
               std::vector<float>& sums);

// How many entries of the row are larger than a value; reuses the memory of `counts`.
int64_t count_larger(const RowView& row, float value, const Parallel& parallel,
                     std::vector<float>& counts);

// c * P over one tile, or over the survivors.
void target_weights(const RowView& row, const RowStats& stats, int64_t t, double c, float* out);
void survivor_weights(const RowStats& stats, const Survivors& s, double c, float* out);

double total(const std::vector<float>& sums);

// Inverse CDF of the weights that `fill(tile, out)` gives, whose tile sums are known. Returns -1 if
// all of them are 0.
template <class Fill>
int64_t draw(const RowView& row, const std::vector<float>& sums, double uniform, Fill&& fill) {
  const double mass = total(sums);
  if (!(mass > 0)) return -1;
  const double target = uniform * mass;
  int64_t chosen = -1;
  double prefix = 0, before = 0;
  for (int64_t t = 0; t < row.tiles(); ++t) {
    if (!(sums[t] > 0)) continue;
    chosen = t;
    before = prefix;
    prefix += static_cast<double>(sums[t]);
    if (prefix > target) break;
  }
  float weights[kTile];
  fill(chosen, weights);
  const int64_t index = tile_kernels().pick(weights, row.tile_size(chosen), before, target);
  return index < 0 ? -1 : chosen * kTile + index;
}

// Inverse CDF of a measured row; scratch as `measure` filled it.
int64_t draw(const RowView& row, const RowStats& stats, const Scratch& scratch, double uniform);

// Gumbel-max sampling: argmax(log P + G), where G is the Gumbel noise.
int64_t gumbel_argmax(const RowView& row, const RowStats& stats, const Scratch& scratch,
                      const GumbelNoise& noise, const Parallel& parallel);

// The same without the list of survivors.
int64_t gumbel_argmax(const RowView& row, const RowStats& stats, const GumbelNoise& noise,
                      const Parallel& parallel);

// Lowest index of the largest entry; maxima as `measure` filled them.
int64_t argmax(const RowView& row, float max, const std::vector<float>& maxima);

}  // namespace specdec::cpu
