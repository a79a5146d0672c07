#include "specdec/ngram_propose.h"

#include "torch/launch.h"
#include "torch/register.h"

namespace specdec {
namespace {

void check_ngram_propose(const Tensor& history, const Tensor& lengths, int64_t gamma,
                         int64_t max_ngram, int64_t min_ngram) {
  SPECDEC_CHECK(history.dim() == 2, "history must be [B, L], got ", shape_of(history));
  check_ids("history", history);
  SPECDEC_CHECK(history.size(1) < int64_t{1} << 31,
                "history must have at most 2147483647 columns, got ", shape_of(history));
  check_integers("lengths", lengths, history.size(0), history, "history");
  SPECDEC_CHECK(gamma >= 0 && gamma < int64_t{1} << 31, "gamma must be in [0, 2147483647], got ",
                gamma);
  check_entries("gamma", "the tokens", "[B, gamma]", {history.size(0), gamma});
  SPECDEC_CHECK(min_ngram >= 1, "min_ngram must be at least 1, got ", min_ngram);
  SPECDEC_CHECK(max_ngram >= min_ngram, "max_ngram must be at least min_ngram = ", min_ngram,
                ", got ", max_ngram);
}

std::tuple<Tensor, Tensor> ngram_propose(Tensor history, Tensor lengths, int64_t gamma,
                                         int64_t max_ngram, int64_t min_ngram) {
  check_ngram_propose(history, lengths, gamma, max_ngram, min_ngram);
  const int64_t batch = history.size(0);
  Tensor tokens = torch::stable::new_empty(history, {batch, gamma}),
         counts = torch::stable::new_empty(history, {batch}, ScalarType::Int);
  lengths = dense_int64(lengths);
  const NgramProposeParams p = {ids_of(history), lengths.const_data_ptr<int64_t>(),
                                ids_out(tokens), counts.mutable_data_ptr<int32_t>(),
                                batch,           history.size(1),
                                gamma,           max_ngram,
                                min_ngram};
  launch(history, p, SPECDEC_PLAIN_LAUNCHERS(NgramProposeParams, ngram_propose));
  return {tokens, counts};
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def(
      "ngram_propose(Tensor history, Tensor lengths, SymInt gamma, int max_ngram, "
      "int min_ngram) -> (Tensor tokens, Tensor counts)");
  m.def(
      "validate_ngram_propose(Tensor history, Tensor lengths, int gamma, int max_ngram, "
      "int min_ngram) -> ()");
}
SPECDEC_IMPLEMENT(ngram_propose)
SPECDEC_VALIDATE(ngram_propose, check_ngram_propose)

}  // namespace
}  // namespace specdec
