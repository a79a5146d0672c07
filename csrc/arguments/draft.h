#pragma once
// The arguments of a verifier that describe the draft distribution Q, and their validation.
#include <optional>
#include <string>
#include <vector>

#include "arguments/checks.h"
#include "specdec/draft.h"

namespace specdec {

constexpr int64_t kAnySize = -1;

struct DraftSize {
  const char* name;
  int64_t size;
};
using DraftSizes = std::vector<DraftSize>;  // one for each dimension

struct DraftArguments {
  std::optional<Tensor> rows, ids, columns, logsumexp, threshold, temperatures, bitmask;
  double temperature = 1;

  auto arguments() {
    return std::make_tuple(
        argument("draft", rows), argument("draft_ids", ids), argument("draft_columns", columns),
        argument("draft_logsumexp", logsumexp), argument("draft_threshold", threshold),
        argument("draft_temperatures", temperatures), argument("draft_temperature", temperature),
        argument("draft_bitmask", bitmask));
  }
  // Throws a message that names the argument, the rule and the value. `sizes` are the dimensions of
  // the rows, without the last one; `statistics` are those of logsumexp and threshold.
  void check(const Tensor& target, int64_t batch, const DraftSizes& sizes,
             const DraftSizes& statistics) const;
  // Pointers into these arguments, which become contiguous where kernels need it.
  DraftParams params(Kind kind, bool flat);

 private:
  void check_draft_rows(const Tensor& target, const DraftSizes& sizes) const;
  void check_ids(const Tensor& target) const;
  void check_statistics(const Tensor& target, const DraftSizes& statistics) const;
};

}  // namespace specdec
