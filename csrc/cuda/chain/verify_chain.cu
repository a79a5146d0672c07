#include "cuda/chain/verify_chain.cuh"
#include "cuda/launch.cuh"
#include "specdec/chain.h"

namespace specdec::cuda {
namespace {

__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    chain_kernel(const __grid_constant__ ChainJob job) {
  wait_for_inputs();
  BlockGroup group = BlockGroup::mine();
  if (thread_id() == 0) {
    group.task<ChainTask>().turn = 0;
    group.task<ChainTask>().used = false;
  }
  __syncthreads();
  // Row-parallel: a group has a part of one row of one sequence, and at most goes on with that one.
  const bool parallel = job.plan.parallel;
  const int64_t groups = gridDim.x / group.size, rows = job.p.gamma + 1;
  int64_t first = blockIdx.x / group.size;
  const auto part = static_cast<int>(first % job.plan.splits);
  first /= job.plan.splits;
  const int64_t row = parallel ? first % rows : 0;
  if (parallel) first /= rows;
  for (int64_t b = first; b < job.p.batch; b += groups) verify(group, job, b, first, row, part);
}

// Rows of given probabilities are touched at single entries: there is nothing to fill beforehand.
bool only_touches(const ChainParams& p) {
  const SamplingParams& s = p.sampling;
  const bool vectors = s.temperatures != nullptr || s.top_ks != nullptr || s.top_ps != nullptr ||
                       s.min_ps != nullptr;
  return p.kind == Kind::kProbs && p.reads_draft() && !vectors && s.temperature == 1 &&
         (s.top_k == 0 || s.top_k >= p.vocab) && s.top_p == 1 && s.min_p == 0;
}

bool needs_ranks(const ChainParams& p) {
  return cuda::needs_ranks(p.sampling, p.rule == Rule::kMatch || p.rule == Rule::kGreedy);
}

// Where things are in the workspace, all of them after the tickets.
struct Layout {
  int64_t records, tile_stats_array, bytes;

  Layout(const ChainParams& p, const ChainJob& job) {
    const int64_t contexts = job.plan.parallel ? p.batch : job.plan.groups;
    records = round_up(p.batch * 8);
    tile_stats_array = records;
    if (p.rule == Rule::kBlock) {
      tile_stats_array += round_up(contexts * job.plan.group_size * (p.gamma + 1) *
                                   static_cast<int64_t>(sizeof(ChainRecord)));
    }
    bytes = tile_stats_array + contexts * job.context_tile_stats() *
                                   TileStatsArray::bytes(warp_tiles_of(p), needs_ranks(p));
  }
};

}  // namespace

int plan_verify_chain(const ChainParams& p, const CudaRequest& request, CudaPlan* plan) {
  Device device;
  const cudaError_t status = current_device(chain_kernel, &device);
  if (status != cudaSuccess) return status;
  CudaRequest wanted = request;
  if (wanted.schedule == Schedule::kAuto && only_touches(p)) wanted.schedule = Schedule::kLazy;
  *plan = make_plan(wanted, device, p.batch, p.gamma + 1, warp_tiles_of(p), true);
  ChainJob job = {};
  job.p = p;
  job.plan = *plan;
  plan->workspace_bytes = Layout(p, job).bytes;
  return cudaSuccess;
}

int verify_chain(const ChainParams& p, const CudaPlan& plan, void* workspace, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  Device device;
  const cudaError_t status = current_device(chain_kernel, &device);
  if (status != cudaSuccess) return status;
  ChainJob job = {};
  job.p = p;
  job.plan = plan;
  const Layout layout(p, job);
  char* const memory = static_cast<char*>(workspace);
  job.tickets = reinterpret_cast<unsigned long long*>(memory);
  job.records = reinterpret_cast<ChainRecord*>(memory + layout.records);
  job.tile_stats_array = {memory + layout.tile_stats_array, warp_tiles_of(p), needs_ranks(p)};
  job.launch = next_launch();
  return launch_groups(chain_kernel, job, plan, device, stream);
}

}  // namespace specdec::cuda
