#pragma once
// The arguments of an op that say what draft_source drafted tokens were drawn from;
// specdec_kernels/_draft_arguments.py in C++.
#include <optional>
#include <string>
#include <vector>

#include "specdec/draft.h"
#include "torch/arguments/checks.h"

namespace specdec {

constexpr int64_t kAnySize = -1;

struct DraftSize {
  const char* name;
  int64_t size;
};
using DraftSizes = std::vector<DraftSize>;  // of each dimension

struct DraftArguments {
  std::optional<Tensor> rows, ids, columns, logsumexp, threshold, temperatures;
  double temperature;

  // Throws what the user did wrong. sizes: of the rows, the last dimension left out; statistics: of
  // what `sample` left behind.
  void check(const Tensor& target, int64_t batch, const DraftSizes& sizes,
             const DraftSizes& statistics) const;
  // Pointers into these arguments, made dense where the kernels want it.
  DraftSource source(Kind kind, bool flat);

 private:
  void check_draft_rows(const Tensor& target, const DraftSizes& sizes) const;
  void check_ids(const Tensor& target) const;
  void check_statistics(const Tensor& target, const DraftSizes& statistics) const;
};

Kind kind_of(const std::string& kind);
bool is_id(ScalarType t);

// Made dense; null where there is none.
template <class T>
const T* pointer(std::optional<Tensor>& t) {
  if (!t) return nullptr;
  *t = dense(*t);
  return t->const_data_ptr<T>();
}

}  // namespace specdec
