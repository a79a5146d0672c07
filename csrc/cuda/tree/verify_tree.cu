#include "cuda/launch.cuh"
#include "cuda/tree/verify_tree.cuh"
#include "specdec/tree.h"

namespace specdec::cuda {
namespace {

constexpr int kTreeBlocksPerProcessor = 2;

__global__ void __launch_bounds__(kThreads, kTreeBlocksPerProcessor)
    tree_kernel(const __grid_constant__ TreeJob job) {
  BlockGroup group = BlockGroup::mine();
  if (thread_id() == 0) {
    TreeTask& t = group.task<TreeTask>();
    t.stats_buffer = t.draft_stats_buffer = 0;
    t.rank = group.rank();
    t.context = blockIdx.x / group.size();
    t.records = job.records + blockIdx.x * (job.p.nodes + 1);
    t.excluded = job.excluded + blockIdx.x * job.p.nodes;
    t.node_sets = job.node_sets + blockIdx.x * 3 * job.words();
  }
  __syncthreads();
  int64_t b = blockIdx.x / group.size();
  while (b < job.p.batch) {
    verify(group, job, b);
    b = group.task<TreeTask>().b + gridDim.x / group.size();
  }
}

bool needs_best(const TreeParams& p) {
  return cuda::needs_best(p.sampling, p.rule == TreeRule::kMatch || p.rule == TreeRule::kGreedy);
}

// Offsets into the workspace, which begins with the records.
struct WorkspaceLayout {
  int64_t excluded, node_sets, tile_stats, bytes;

  WorkspaceLayout(const TreeParams& p, const TreeJob& job) {
    const int64_t blocks = job.plan.groups * job.plan.group_size;
    // Rules that do not read the draft keep no records.
    const int64_t nodes = p.reads_draft() ? p.nodes : -1;
    excluded = round_up(blocks * (nodes + 1) * static_cast<int64_t>(sizeof(NodeRecord)));
    node_sets =
        excluded +
        round_up(nodes > 0 ? blocks * nodes * static_cast<int64_t>(sizeof(ExcludedToken)) : 0);
    tile_stats =
        node_sets + round_up(blocks * 3 * job.words() * static_cast<int64_t>(sizeof(uint32_t)));
    bytes = tile_stats + job.plan.groups * job.context_tile_stats() *
                             TileStatsArray::bytes(warp_tiles_of(p), needs_best(p));
  }
};

GroupKernel<TreeJob> kernel(tree_kernel, kTreeBlocksPerProcessor);

}  // namespace

// How the launch shares its work: the group of a sequence reads rows in order, because most rows of
// a tree are not on the path.
static cudaError_t plan_of(const TreeParams& p, CudaPlan* plan) {
  Device device;
  const cudaError_t status = kernel.device(&device);
  if (status != cudaSuccess) return status;
  *plan = make_plan({Schedule::kLazy, 0}, device, {p.batch, 1, warp_tiles_of(p), true});
  return cudaSuccess;
}

int64_t workspace_bytes(const TreeParams& p) {
  TreeJob job = {};
  job.p = p;
  // A device that cannot be asked fails at the launch.
  return plan_of(p, &job.plan) == cudaSuccess ? WorkspaceLayout(p, job).bytes : 0;
}

int verify_tree(const TreeParams& p, void* workspace, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  TreeJob job = {};
  job.p = p;
  const cudaError_t status = plan_of(p, &job.plan);
  if (status != cudaSuccess) return status;
  const WorkspaceLayout layout(p, job);
  char* const memory = static_cast<char*>(workspace);
  job.records = reinterpret_cast<NodeRecord*>(memory);
  job.excluded = reinterpret_cast<ExcludedToken*>(memory + layout.excluded);
  job.node_sets = reinterpret_cast<uint32_t*>(memory + layout.node_sets);
  job.tile_stats_array = {memory + layout.tile_stats, warp_tiles_of(p), needs_best(p)};
  return kernel.launch(job, stream);
}

}  // namespace specdec::cuda
