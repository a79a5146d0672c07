#include "arguments/sample.h"

#include "torch/arguments/out.h"
#include "torch/register.h"

namespace specdec {
namespace {

int64_t sample_workspace_bytes(int64_t rows, int64_t vocab) {
  check_call_size("rows", rows, "rows", 1, vocab);
  auto p = most_demanding<SampleParams>(vocab);
  p.num_rows = rows;
  return workspace_bytes(p, SPECDEC_LAUNCHERS(SampleParams, sample));
}

int64_t needed_by_sample(const SampleArguments& a) {
  return sample_workspace_bytes(a.logits.size(0), a.logits.size(1));
}
using SampleWithOut = OutArguments<SampleArguments, needed_by_sample>;

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  define_with_out<SampleArguments, SampleWithOut>(m, "sample");
  m.def("sample_workspace_bytes(int rows, int vocab) -> int");
}
constexpr auto& sample = Op<SampleArguments>::run;
constexpr auto& sample_out = Op<SampleWithOut>::run;
SPECDEC_IMPLEMENT(sample)
SPECDEC_IMPLEMENT(sample_out)
SPECDEC_IMPLEMENT_ANYWHERE(sample_workspace_bytes)
SPECDEC_VALIDATE(sample, Op<SampleArguments>::validate)
SPECDEC_VALIDATE(sample_out, Op<SampleWithOut>::validate)

}  // namespace
}  // namespace specdec
