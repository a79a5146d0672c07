// The op verify_chain on CUDA devices: plans and launches the kernel of cuda/chain/kernel.cuh.
#include <algorithm>

#include "cuda/chain/kernels.cuh"
#include "specdec/chain.h"

namespace specdec::cuda {
namespace {

// Here, where no kernel is defined: where one is, each use would compile another copy of it.
ChainKernel& chain_kernel_of(Variant variant) {
  return variant == Variant::kLogits  ? cuda::chain_kernel_of<Variant::kLogits>()
         : variant == Variant::kProbs ? cuda::chain_kernel_of<Variant::kProbs>()
                                      : cuda::chain_kernel_of<Variant::kGeneral>();
}

// Whether all target rows are direct and read at single entries: then there is nothing to compute
// for all rows beforehand, and a group for each sequence takes within 2 us of several on an H200.
bool all_direct(const ChainParams& p) {
  const SamplingParams& s = p.sampling;
  return p.kind == Kind::kProbs && p.reads_draft() && s.temperatures == nullptr &&
         s.temperature == 1 && !may_filter(s, p.vocab);
}

bool needs_best(const ChainParams& p) {
  return cuda::needs_best(p.sampling, p.rule == Rule::kMatch || p.rule == Rule::kGreedy);
}

// Offsets in the workspace, which begins with the tickets.
struct WorkspaceLayout {
  int64_t records, tile_stats_array, bytes;

  explicit WorkspaceLayout(const ChainJob& job) {
    const ChainParams& p = job.p;
    const int64_t contexts = job.plan.parallel ? p.batch : job.plan.groups;
    records = round_up(p.batch * 8);
    tile_stats_array = records;
    if (p.rule == Rule::kBlock) {
      tile_stats_array += round_up(contexts * job.plan.group_size * (p.gamma + 1) *
                                   static_cast<int64_t>(sizeof(ChainRecord)));
    }
    bytes = tile_stats_array + contexts * job.context_tile_stats() *
                                   TileStatsArray::bytes(warp_tiles_of(p), needs_best(p));
  }
};

ChainJob job_of(const ChainParams& p, const CudaPlan& plan) {
  ChainJob job = {};
  job.p = p;
  job.plan = plan;
  return job;
}

}  // namespace

int plan_verify_chain(const ChainParams& p, const CudaRequest& request, CudaPlan* plan) {
  Device device;
  const Variant variant = variant_of(p);
  const cudaError_t status = chain_kernel_of(variant).device(&device);
  if (status != cudaSuccess) return status;
  CudaRequest wanted = request;
  if (wanted.schedule == Schedule::kAuto && all_direct(p)) wanted.schedule = Schedule::kLazy;
  const bool measures_drafts =
      p.reads_draft() && p.kind == Kind::kLogits && p.draft.form == DraftForm::kRows;
  *plan = make_plan(wanted, device,
                    {p.batch, p.gamma + 1, warp_tiles_of(p), true, variant != Variant::kGeneral,
                     measures_drafts});
  plan->workspace_bytes = WorkspaceLayout(job_of(p, *plan)).bytes;
  return cudaSuccess;
}

int verify_chain(const ChainParams& p, const CudaPlan& plan, void* workspace, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  ChainJob job = job_of(p, plan);
  const WorkspaceLayout layout(job);
  char* const memory = static_cast<char*>(workspace);
  job.tickets = reinterpret_cast<unsigned long long*>(memory);
  job.records = reinterpret_cast<ChainRecord*>(memory + layout.records);
  job.tile_stats_array = {memory + layout.tile_stats_array, warp_tiles_of(p), needs_best(p)};
  job.launch_id = next_launch_id();
  return chain_kernel_of(variant_of(p)).launch(job, stream);
}

}  // namespace specdec::cuda
