#include "host/draft_chains.h"

#include <algorithm>
#include <queue>

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
  Drafting(const Wanted& wanted, int64_t* tokens, float* confidence)
      : wanted_(wanted), tokens_(tokens), confidence_(confidence) {}

  // A later source has the probability that the sources before it leave to unseen tokens.
  void open(const std::vector<Start>& starts) {
    double left = 1;
    std::vector<int32_t> seen;
    for (const Start& start : starts) {
      start.source->continuations(start.cursor, wanted_.min_match, wanted_.count, options_);
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
    for (; chains < wanted_.count && !branches_.empty(); ++chains) {
      const Branch branch = branches_.top();
      branches_.pop();
      std::copy_n(tokens_ + branch.chain * wanted_.gamma, branch.depth,
                  tokens_ + chains * wanted_.gamma);
      std::copy_n(confidence_ + branch.chain * wanted_.gamma, branch.depth,
                  confidence_ + chains * wanted_.gamma);
      follow(branch, chains);
    }
    return chains;
  }

 private:
  void push(double probability, int64_t chain, int64_t depth, const Source* source,
            const Continuation& option) {
    if (probability < wanted_.min_confidence) return;
    branches_.push({probability, pushed_++, chain, depth, source, option});
  }

  // Writes a branch and the most probable tokens after it.
  void follow(const Branch& branch, int64_t chain) {
    Continuation taken = branch.option;
    double probability = branch.probability;
    for (int64_t depth = branch.depth;; ++depth) {
      tokens_[chain * wanted_.gamma + depth] = taken.token;
      confidence_[chain * wanted_.gamma + depth] = static_cast<float>(taken.confidence);
      if (depth + 1 == wanted_.gamma) return;
      branch.source->continuations(taken.next, wanted_.min_match, wanted_.count - chain, options_);
      if (options_.empty()) return;
      for (size_t k = 1; k < options_.size(); ++k) {
        push(probability * options_[k].confidence, chain, depth + 1, branch.source, options_[k]);
      }
      taken = options_[0];
      probability *= taken.confidence;
      if (probability < wanted_.min_confidence) return;
    }
  }

  const Wanted wanted_;
  int64_t* tokens_;
  float* confidence_;
  int64_t pushed_ = 0;
  std::vector<Continuation> options_;
  std::priority_queue<Branch> branches_;
};

}  // namespace

int64_t draft_chains(const std::vector<Start>& starts, const Wanted& wanted, int64_t* tokens,
                     float* confidence) {
  std::fill_n(tokens, wanted.gamma * wanted.count, -1);
  std::fill_n(confidence, wanted.gamma * wanted.count, 0.0f);
  Drafting drafting(wanted, tokens, confidence);
  drafting.open(starts);
  return drafting.draft();
}

}  // namespace specdec::host
