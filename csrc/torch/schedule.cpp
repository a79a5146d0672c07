#include "torch/provider.h"

#include <string>

#include "torch/register.h"

namespace specdec {

CudaRequest& cuda_request() {
  static CudaRequest request = {Schedule::kAuto, 0};
  return request;
}

namespace {

// How the CUDA kernels share their work out from now on; no result depends on it.
void set_cuda_schedule(std::string schedule, int64_t group) {
  SPECDEC_CHECK(schedule == "auto" || schedule == "lazy" || schedule == "parallel",
                "schedule must be one of auto, lazy, parallel, got ", schedule);
  SPECDEC_CHECK(group >= 0 && group <= 8 && (group & (group - 1)) == 0,
                "group must be 0 (by size), 1, 2, 4 or 8, got ", group);
  cuda_request() = {schedule == "auto"   ? Schedule::kAuto
                    : schedule == "lazy" ? Schedule::kLazy
                                         : Schedule::kParallel,
                    static_cast<int32_t>(group)};
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def("set_cuda_schedule(str schedule, int group) -> ()");
}
SPECDEC_IMPLEMENT_ANYWHERE(set_cuda_schedule)

}  // namespace
}  // namespace specdec
