#pragma once
// The residual of one target row after siblings were rejected: max(cP - sum of s_m Q_m, 0). It is
// computed tile by tile whenever it is needed and never stored.
#include <deque>
#include <vector>

#include "cpu/row/draft.h"

namespace specdec::cpu {

// A draft distribution that siblings were drawn from.
struct TriedDraft {
  int64_t parent, key;  // siblings drawn from one distribution have both in common
  DraftDistribution draft;
  double scale = 0;               // the multiple of Q subtracted from the target so far
  std::vector<int64_t> excluded;  // tokens whose probability in Q counts as 0
  double mass = 1;                // mass of Q outside the excluded tokens; NaN: not summed yet

  // Probabilities of the tokens [begin, begin + n). False if the draft row is invalid.
  bool weights(int64_t begin, int64_t n, float* out) const;
  double at(int64_t token) const;
  // Sums `mass` unless it is known; false if the draft row is invalid.
  bool sum_mass(int64_t vocab, const Parallel& parallel, std::vector<float>& sums);
};

// Reused from row to row: [tiles] each.
struct ResidualScratch {
  std::vector<float> positive, negative, masses;
  std::vector<Overlap> overlaps;  // of rule k_seq, a few for each tile
};

class Residual {
 public:
  // survivors: all tokens with mass where filters left few of them, else null.
  Residual(const RowView& row, const RowStats& stats, double target_scale,
           const Survivors* survivors, const Parallel& parallel, ResidualScratch& scratch)
      : row(row),
        stats(stats),
        target_scale_(target_scale),
        survivors_(survivors),
        parallel_(&parallel),
        scratch_(&scratch) {}

  struct Sums {
    bool valid = true;    // false: the draft row is invalid
    double positive = 0;  // sum of max(residual - sQ, 0)
    double negative = 0;  // sum of max(sQ - residual, 0), only if asked for
  };

  RowView row;
  RowStats stats;
  double mass = 1;  // the multiple of the next sibling's Q that is compared with the residual

  // Finds the draft with this parent and key, or adds what `make` returns. References stay valid.
  template <class Make>
  TriedDraft& tried(int64_t parent, int64_t key, Make&& make) {
    for (TriedDraft& t : drafts_) {
      if (t.parent == parent && t.key == key) return t;
    }
    drafts_.push_back(TriedDraft{parent, key, make(), 0, {}, 1});
    return drafts_.back();
  }

  // Whether nothing was subtracted: the residual is still P, scaled.
  bool is_target() const { return last_subtracted_ == nullptr; }
  double target_scale() const { return target_scale_; }  // c
  double at(int64_t token) const;
  // The sums after `scale` times this draft would be subtracted. `draft` itself is unchanged but
  // for what the scan finds out about its row.
  Sums sums_after(TriedDraft& draft, double scale, bool with_negative);
  // Subtracts the draft of the last `sums_after`, with the same scale.
  void subtract(TriedDraft& draft, double scale);
  // Sets the residual and the draft to 0 at a rejected token.
  void exclude(TriedDraft& draft, int64_t token);
  void undo_exclude(TriedDraft& draft);
  // A token of the residual, -1 if no mass remains. Needs a draft to have been subtracted.
  int64_t draw(double uniform);

 private:
  bool lookup_suffices(const TriedDraft& next) const;
  Sums sums_by_lookup(const TriedDraft& next, double scale) const;
  Sums sums_by_scan(TriedDraft& next, double scale, bool with_negative);
  // The residual at the survivors; returns its sum.
  double fill_survivors(const TriedDraft& next, double scale, float* out) const;
  // One tile of the residual after `scale` more of `next` is subtracted. `negative` (the part of
  // scale * next above the residual) and `draft_mass` (the sum of `next` in this tile) may be null.
  // False if the draft row of `next` is invalid.
  bool fill_tile(int64_t t, const TriedDraft& next, double scale, float* out, float* negative,
                 float* draft_mass) const;

  double target_scale_;
  const Survivors* survivors_;
  const Parallel* parallel_;
  ResidualScratch* scratch_;
  std::deque<TriedDraft> drafts_;
  std::vector<int64_t> excluded_;
  // Subtraction is clipped, so its order matters: the draft subtracted last stays last.
  TriedDraft* last_subtracted_ = nullptr;
  bool scanned_ = false;       // scratch_->positive holds the sums of the last `sums_after`,
  bool sums_current_ = false;  // and these are the residual's tile sums
};

}  // namespace specdec::cpu
