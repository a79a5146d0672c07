#include <algorithm>
#include <queue>

#include "host/continuations.h"

namespace specdec::host {
namespace {

// A continuation that no chain has taken yet.
struct Branch {
  double probability;  // of the chain up to and with this token
  int64_t number;      // the earlier of two equally probable branches comes first
  int64_t chain;       // whose first `depth` tokens precede it
  int64_t depth;
  const Source* source;
  Continuation option;

  bool operator<(const Branch& other) const {
    return probability != other.probability ? probability < other.probability
                                            : number > other.number;
  }
};

class Drafting {
 public:
  Drafting(int64_t min_match, int64_t gamma, int64_t count, int64_t* tokens, float* confidence)
      : min_match_(min_match),
        gamma_(gamma),
        count_(count),
        tokens_(tokens),
        confidence_(confidence) {}

  // A later source has the probability that the sources before it leave to unseen tokens.
  void open(const std::vector<Start>& starts) {
    double left = 1;
    std::vector<int32_t> seen;
    for (const Start& start : starts) {
      start.source->continuations(start.cursor, min_match_, count_, options_);
      double taken = 0;
      for (Continuation& option : options_) {
        taken += option.confidence;
        if (std::find(seen.begin(), seen.end(), option.token) != seen.end()) continue;
        seen.push_back(option.token);
        option.confidence *= left;
        push(option.confidence, 0, 0, start.source, option);
      }
      left *= std::max(0.0, 1 - taken);
    }
  }

  int64_t draft() {
    int64_t chains = 0;
    for (; chains < count_ && !branches_.empty(); ++chains) {
      const Branch branch = branches_.top();
      branches_.pop();
      std::copy_n(tokens_ + branch.chain * gamma_, branch.depth, tokens_ + chains * gamma_);
      std::copy_n(confidence_ + branch.chain * gamma_, branch.depth, confidence_ + chains * gamma_);
      follow(branch, chains);
    }
    return chains;
  }

 private:
  void push(double probability, int64_t chain, int64_t depth, const Source* source,
            const Continuation& option) {
    branches_.push({probability, pushed_++, chain, depth, source, option});
  }

  // Writes a branch and the most probable tokens behind it.
  void follow(const Branch& branch, int64_t chain) {
    Continuation taken = branch.option;
    double probability = branch.probability;
    for (int64_t depth = branch.depth;; ++depth) {
      tokens_[chain * gamma_ + depth] = taken.token;
      confidence_[chain * gamma_ + depth] = static_cast<float>(taken.confidence);
      if (depth + 1 == gamma_) return;
      branch.source->continuations(taken.next, min_match_, count_ - chain, options_);
      if (options_.empty()) return;
      for (size_t k = 1; k < options_.size(); ++k) {
        push(probability * options_[k].confidence, chain, depth + 1, branch.source, options_[k]);
      }
      taken = options_[0];
      probability *= taken.confidence;
    }
  }

  const int64_t min_match_, gamma_, count_;
  int64_t* tokens_;
  float* confidence_;
  int64_t pushed_ = 0;
  std::vector<Continuation> options_;
  std::priority_queue<Branch> branches_;
};

}  // namespace

int64_t draft_chains(const std::vector<Start>& starts, int64_t min_match, int64_t gamma,
                     int64_t count, int64_t* tokens, float* confidence) {
  std::fill_n(tokens, gamma * count, -1);
  std::fill_n(confidence, gamma * count, 0.0f);
  if (gamma == 0 || count == 0) return 0;
  Drafting drafting(min_match, gamma, count, tokens, confidence);
  drafting.open(starts);
  return drafting.draft();
}

}  // namespace specdec::host
