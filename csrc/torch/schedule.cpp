#include "torch/schedule.h"

#include <tuple>

#include "arguments/checks.h"
#include "torch/register.h"

namespace specdec {

CudaRequest& cuda_request() {
  static CudaRequest request = {Schedule::kAuto, 0};
  return request;
}

CudaPlan& last_cuda_plan() {
  thread_local CudaPlan plan = {};
  return plan;
}

namespace {

// Sets how the CUDA kernels share their work from now on; no result depends on it.
void set_cuda_schedule(int64_t schedule, int64_t group) {
  const Schedule chosen = enum_of("schedule", schedule, Schedule::kParallel);
  SPECDEC_CHECK(group >= 0 && group <= 8, "group must be 0 (automatic) or 1 to 8, got ", group);
  cuda_request() = {chosen, static_cast<int32_t>(group)};
}

#ifdef SPECDEC_WITH_CUDA
constexpr const char* kNoPlan = "got none";
#else
constexpr const char* kNoPlan = "but specdec_kernels was built without CUDA kernels";
#endif

// How this thread's last launch of `sample`, `verify_chain` or `verify_tree` shared its work, so
// that a measurement can say what it measured.
std::tuple<int64_t, int64_t, int64_t, int64_t, bool> last_cuda_schedule() {
  const CudaPlan& plan = last_cuda_plan();
  SPECDEC_CHECK(plan.groups > 0,
                "last_cuda_schedule must come after a launch on a CUDA device in the same thread, ",
                kNoPlan);
  return {plan.workspace_bytes, plan.groups, plan.group_size, plan.splits, plan.parallel};
}

STABLE_TORCH_LIBRARY_FRAGMENT(SPECDEC_LIBRARY, m) {
  m.def("set_cuda_schedule(int schedule, int group) -> ()");
  m.def(
      "last_cuda_schedule() -> (int workspace_bytes, int groups, int group_size, int splits, bool "
      "parallel)");
}
SPECDEC_IMPLEMENT_ANYWHERE(set_cuda_schedule)
SPECDEC_IMPLEMENT_ANYWHERE(last_cuda_schedule)

}  // namespace
}  // namespace specdec
