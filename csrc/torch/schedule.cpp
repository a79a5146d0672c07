#include "torch/schedule.h"

#include "arguments/checks.h"
#include "torch/register.h"

namespace specdec {

CudaRequest& cuda_request() {
  static CudaRequest request = {Schedule::kAuto, 0};
  return request;
}

namespace {

// Sets how the CUDA kernels share their work from now on; no result depends on it.
void set_cuda_schedule(int64_t schedule, int64_t group) {
  const Schedule chosen = enum_of("schedule", schedule, Schedule::kParallel);
  SPECDEC_CHECK(group >= 0 && group <= 8, "group must be 0 (automatic) or 1 to 8, got ", group);
  cuda_request() = {chosen, static_cast<int32_t>(group)};
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def("set_cuda_schedule(int schedule, int group) -> ()");
}
SPECDEC_IMPLEMENT_ANYWHERE(set_cuda_schedule)

}  // namespace
}  // namespace specdec
