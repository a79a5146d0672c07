#pragma once
// The variant `<op>_out` of an op: its results go into tensors of the caller, and its CUDA kernels
// work in a tensor of the caller. Both may be used again by the next call.
#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "arguments/memory.h"
#include "arguments/output.h"
#include "specdec/verification.h"
#include "torch/launch.h"
#include "torch/register.h"

namespace specdec {

// Parameters with the fields that decide how much memory CUDA kernels need, and with what asks for
// the most: a filter, a temperature for each sequence, and logits that have to be measured.
template <class OpParams>
OpParams most_demanding(int64_t vocab) {
  static constexpr float kTemperature = 1;
  OpParams p{};
  p.vocab = vocab;
  p.sampling.temperatures = &kTemperature;
  p.sampling.top_p = 0.5f;
  if constexpr (std::is_base_of_v<VerifyParams, OpParams>) {
    p.kind = Kind::kLogits;
    p.draft.form = DraftForm::kRows;
    p.draft.vocab = vocab;
  }
  return p;
}

// Validation of the sizes that a workspace is asked for: of `number` sequences, each with `size`
// drafts or nodes.
inline void check_call_size(const char* name, int64_t number, const char* size_name, int64_t size,
                            int64_t vocab) {
  SPECDEC_CHECK(number >= 0, name, " must be at least 0, got ", number);
  SPECDEC_CHECK(size >= 0, size_name, " must be at least 0, got ", size);
  SPECDEC_CHECK(vocab >= 1 && vocab < (int64_t{1} << 31), "vocab must be in [1, 2147483647], got ",
                vocab);
  int64_t bytes = 4096;  // more than all arrays have for an entry of a row
  bool overflow = false;
  for (const int64_t n : {number, size, vocab}) {
    overflow |= __builtin_mul_overflow(bytes, std::max<int64_t>(n, 1), &bytes);
  }
  SPECDEC_CHECK(!overflow, name, " must be so small that no size in bytes overflows, got ", number);
}

// `needed`: the bytes of a workspace that suffice for a call on a CUDA device.
template <class Arguments, int64_t (*needed)(const Arguments&)>
struct OutArguments : Arguments {
  static constexpr size_t kNumber = Arguments::kOutputs.size();

  std::array<std::optional<Tensor>, kNumber> out;
  std::optional<Tensor> workspace;

  auto arguments() { return list(std::make_index_sequence<kNumber>()); }

  void check() {
    Arguments::check();
    const auto first = std::get<0>(Arguments::arguments());
    const auto wanted = Arguments::outputs();
    for (size_t i = 0; i < kNumber; ++i) {
      check_output(Arguments::kOutputs[i], wanted[i], out[i], first);
    }
    if (workspace) check_workspace(first);
    check_apart(written(), read());
  }

  void run() {
    check();
    std::apply(
        [&](const auto&... each) { Arguments::run_into({each ? *each : Tensor()...}, workspace); },
        out);
  }

 private:
  static constexpr const char* kTypes[] = {"Tensor(a!)?", "Tensor(b!)?", "Tensor(c!)?",
                                           "Tensor(d!)?", "Tensor(e!)?", "Tensor(f!)?"};

  template <size_t... i>
  auto list(std::index_sequence<i...>) {
    return std::tuple_cat(Arguments::arguments(),
                          std::make_tuple(argument(Arguments::kOutputs[i], out[i], kTypes[i])...,
                                          argument("workspace", workspace, "Tensor(g!)?")));
  }

  static void check_output(const std::string& field, const Output& wanted,
                           const std::optional<Tensor>& t, const Argument<Tensor>& first) {
    const std::string name = "out." + field;
    if (!wanted.wanted) {
      SPECDEC_CHECK(!t || t->numel() == 0, name, " must be None or empty unless with_", field,
                    " is True, got ", shape_of(*t));
      return;
    }
    SPECDEC_CHECK(t, name, " must be a tensor, got None");
    if (wanted.columns == Output::kVector) {
      check_vector(name.c_str(), *t, wanted.rows, wanted.dtype, first.value, first.name);
    } else {
      check_matrix(name.c_str(), *t, wanted.dims, wanted.rows, wanted.columns, wanted.dtype,
                   first.value, first.name);
    }
    SPECDEC_CHECK(t->is_contiguous(), name, " must be contiguous, got stride ", t->stride(0),
                  " in dimension 0 of ", shape_of(*t));
  }

  void check_workspace(const Argument<Tensor>& first) const {
    SPECDEC_CHECK(workspace->dim() == 1, "workspace must have one dimension, got ",
                  shape_of(*workspace));
    SPECDEC_CHECK(workspace->scalar_type() == ScalarType::Byte, "workspace must be uint8, got ",
                  dtype_name(*workspace));
    SPECDEC_CHECK(workspace->is_contiguous(), "workspace must be contiguous, got stride ",
                  workspace->stride(0));
    check_same_device("workspace", *workspace, first.value, first.name);
    if (!first.value.is_cpu()) check_workspace_size(*workspace, needed(*this));
  }

  std::vector<NamedTensor> written() const {
    std::vector<NamedTensor> found;
    for (size_t i = 0; i < kNumber; ++i) {
      if (out[i]) found.push_back({std::string("out.") + Arguments::kOutputs[i], &*out[i]});
    }
    if (workspace) found.push_back({"workspace", &*workspace});
    return found;
  }

  std::vector<NamedTensor> read() {
    std::vector<NamedTensor> found;
    const auto add = [&](const auto& one) {
      using T = std::decay_t<decltype(one.value)>;
      if constexpr (std::is_same_v<T, Tensor>) {
        found.push_back({one.name, &one.value});
      } else if constexpr (std::is_same_v<T, std::optional<Tensor>>) {
        if (one.value) found.push_back({one.name, &*one.value});
      }
    };
    std::apply([&](const auto&... each) { (add(each), ...); }, Arguments::arguments());
    return found;
  }
};

// Defines an op and its variant with `out`.
template <class Arguments, class WithOut, class Library>
void define_with_out(Library& library, const std::string& op) {
  std::string results;
  for (const char* name : Arguments::kOutputs) {
    results += std::string(results.empty() ? "(" : ", ") + "Tensor " + name;
  }
  define<Arguments>(library, op, results + ")");
  define<WithOut>(library, op + "_out", "()");
}

}  // namespace specdec
