#include "torch/provider.h"

#include "torch/ops.h"

namespace specdec {

CudaRequest& cuda_request() {
  static CudaRequest request = {Schedule::kAuto, 0};
  return request;
}

void set_cuda_schedule(std::string schedule, int64_t team) {
  SPECDEC_CHECK(schedule == "auto" || schedule == "lazy" || schedule == "parallel",
                "schedule must be one of auto, lazy, parallel, got ", schedule);
  SPECDEC_CHECK(team >= 0 && team <= 8 && (team & (team - 1)) == 0,
                "team must be 0 (by size), 1, 2, 4 or 8, got ", team);
  cuda_request() = {schedule == "auto"   ? Schedule::kAuto
                    : schedule == "lazy" ? Schedule::kLazy
                                         : Schedule::kParallel,
                    static_cast<int32_t>(team)};
}

}  // namespace specdec
