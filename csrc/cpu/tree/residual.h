#pragma once
// What the target has left at one point of a tree after siblings were rejected:
// max(cP - sum of s_m Q_m, 0), which is read again tile by tile and never written down.
#include <deque>
#include <vector>

#include "cpu/row/draft.h"

namespace specdec::cpu {

// A law that siblings were drawn from.
struct Taken {
  int64_t parent, key;  // what it is known by: siblings drawn together share it
  DraftDistribution draft;
  double scale = 0;              // how often it was taken from the target so far
  std::vector<int64_t> without;  // tokens at which it counts for nothing
  double rest = 1;               // its mass off them; NaN: to be summed

  // Probabilities of the tokens [begin, begin + n). False if what was read is no law.
  bool weights(int64_t begin, int64_t n, float* out) const;
  double at(int64_t token) const;
  // Sums `rest`; false if the row is no law.
  bool sum_rest(int64_t vocab, const Parallel& parallel, std::vector<float>& sums);
};

// Reused from point to point: [tiles] each.
struct LeftMemory {
  std::vector<float> more, less, mass;
  std::vector<Overlap> overlaps;  // of rule k_seq, a few a tile
};

class Left {
 public:
  // listed: all that has mass of a filtered row, else null.
  Left(const RowView& row, const RowStats& stats, double c, const Survivors* listed,
       const Parallel& parallel, LeftMemory& memory)
      : row(row), stats(stats), c_(c), listed_(listed), parallel_(&parallel), memory_(&memory) {}

  struct Step {
    bool valid = true;  // false: the draft row is no law
    double more = 0;    // sum of max(left - sQ, 0)
    double less = 0;    // sum of max(sQ - left, 0), only if asked for
  };

  RowView row;
  RowStats stats;
  double mass = 1;  // scale of the next sibling's law

  // The law known by these, made by `make` where it is new. References stay valid.
  template <class Make>
  Taken& taken(int64_t parent, int64_t key, Make&& make) {
    for (Taken& t : taken_) {
      if (t.parent == parent && t.key == key) return t;
    }
    taken_.push_back(Taken{parent, key, make(), 0, {}, 1});
    return taken_.back();
  }

  bool untouched() const { return newest_ == nullptr; }
  double scale() const { return c_; }  // of P
  double at(int64_t token) const;
  // What another `scale` of a law would leave.
  Step weigh(Taken& taken, double scale, bool both);
  // Takes what was weighed last.
  void take(Taken& taken, double scale);
  // Nothing is left of a token, and its law counts for nothing there.
  void remove(Taken& taken, int64_t token);
  void restore(Taken& taken);  // the last one
  // A token of what is left, -1 if nothing is. Not of what is untouched.
  int64_t draw(double uniform);

 private:
  // Whether the tokens of few laws are all that needs to be looked at.
  bool worth_looking_up(const Taken& next) const;
  Step look_up(const Taken& next, double scale) const;
  Step scan(Taken& next, double scale, bool both);
  double among(const Taken& next, double scale, float* out) const;
  bool tile(int64_t t, const Taken& next, double scale, float* out, float* less, float* mass) const;

  double c_;
  const Survivors* listed_;
  const Parallel* parallel_;
  LeftMemory* memory_;
  std::deque<Taken> taken_;
  std::vector<int64_t> removed_;
  Taken* newest_ = nullptr;  // taken last, and so subtracted last
  bool scanned_ = false;     // memory_->more is of what `weigh` saw,
  bool summed_ = false;      // and that was taken
};

}  // namespace specdec::cpu
