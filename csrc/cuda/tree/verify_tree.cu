// The op verify_tree on CUDA devices, in two launches:
//   rows    (rows.cuh)                   measures rows
//   decide  (decide.cuh, traversal.cuh)  a block for each sequence goes through its tree; rule
//                                        traversal has one more where a temperature may be 0
#include "cuda/launch.cuh"
#include "cuda/tree/decide.cuh"
#include "cuda/tree/rows.cuh"
#include "cuda/tree/traversal.cuh"
#include "specdec/tree.h"

namespace specdec::cuda {
namespace {

// Fills the outputs as if nothing were emitted and no node tested.
__device__ void clear_outputs(const TreeParams& p, int64_t b) {
  for (int64_t i = thread_id(); i <= p.max_depth; i += kThreads) {
    const int64_t at = b * (p.max_depth + 1) + i;
    if (i < p.max_depth) put_id(p.path, p.parents_are_int64, b * p.max_depth + i, -1);
    put_id(p.tokens, p.ids_are_int64, at, -1);
    if (p.logprobs != nullptr) p.logprobs[at] = 0;
  }
  if (p.accept_probs == nullptr) return;
  for (int64_t n = thread_id(); n < p.nodes; n += kThreads) p.accept_probs[b * p.nodes + n] = NAN;
}

// Reports nodes out of range.
__device__ void check_nodes(ThreadBlock& block, const TreeParams& p, TreeSequence& s) {
  int64_t faults = 0;
  for (int64_t n = thread_id(); n < s.nodes; n += kThreads) {
    faults += !p.valid_node(n, p.drafted(s.b, n), p.parent(s.b, n));
  }
  faults = block.sum(faults);
  if (thread_id() == 0 && faults > 0) s.status |= kDraftOutOfRange;
}

constexpr int kTreeBlocks = 2;  // that run at once on a multiprocessor

// A kernel for each way through a tree, because together they would need more registers. At
// temperature 0 rule traversal decides as rule greedy does.
template <class Verifier>
__global__ void __launch_bounds__(kThreads, kTreeBlocks)
    tree_kernel(const __grid_constant__ TreeJob job) {
  auto& s = *shared_memory<TreeShared>();
  const TreeParams& p = job.p;
  const int64_t b = blockIdx.x;
  TreeSequence& q = s.sequence;
  if (thread_id() == 0) {
    open(p, b, q);
    s.accepted = 0;
  }
  __syncthreads();
  const bool traverses = p.rule == TreeRule::kTraversal && !q.greedy;
  if (traverses != std::is_same_v<Verifier, Traversal>) return;
  clear_outputs(p, b);
  ThreadBlock block(s);
  check_nodes(block, p, q);
  if (!q.nothing_to_verify && q.max_tokens > 0) Verifier(job, s).run();
  if (thread_id() != 0) return;
  p.num_accepted[b] = s.accepted;
  p.status[b] = q.status;
}

// Lays the arrays of a call out in its workspace; returns their size.
int64_t lay_out(TreeJob& job, char* workspace) {
  const TreeParams& p = job.p;
  const int64_t targets = p.batch * job.targets();
  Layout layout(workspace);
  layout.array(job.summaries, p.batch * job.rows());
  layout.array(job.tickets, p.batch * job.rows());
  layout.array(job.lists, filters(p) ? targets * most_listed(p.vocab) : 0);
  job.tile_stats = layout.statistics(p.batch * job.rows(), warp_tiles_of(p), needs_best(p));
  job.sums =
      layout.statistics(p.reads_draft() ? p.batch * job.num_sums() : 0, warp_tiles_of(p), false);
  layout.array(job.records, p.reads_draft() ? targets : 0);
  layout.array(job.excluded, p.reads_draft() ? p.batch * p.nodes : 0);
  layout.array(job.node_sets, p.batch * 3 * job.words());
  layout.array(job.first_of_row, job.measures_drafts ? p.batch * p.nodes : 0);
  return layout.bytes();
}

TreeJob job_of(const TreeParams& p) {
  TreeJob job = {};
  job.p = p;
  job.measures_drafts = measures_drafts(p);
  return job;
}

}  // namespace

int64_t workspace_bytes(const TreeParams& p) {
  TreeJob job = job_of(p);
  return lay_out(job, nullptr);
}

int verify_tree(const TreeParams& p, void* workspace, void* stream) {
  if (p.batch == 0) return cudaSuccess;
  int processors = 0;
  cudaError_t status = multiprocessors(&processors);
  if (status != cudaSuccess) return status;
  TreeJob job = job_of(p);
  lay_out(job, static_cast<char*>(workspace));
  job.launch_id = next_launch_id();
  const int64_t units = p.batch * job.rows();
  job.splits = splits_of(processors, units, warp_tiles_of(p));
  status = launch_blocks(tree_rows_kernel, job, units * job.splits,
                         shared_bytes<TreeRowsShared>(filters(p)), stream);
  if (status != cudaSuccess) return status;
  const size_t shared = shared_bytes<TreeShared>(filters(p));
  const bool traversal = p.rule == TreeRule::kTraversal;
  if (traversal) status = launch_blocks(tree_kernel<Traversal>, job, p.batch, shared, stream);
  const bool may_be_greedy = p.sampling.temperatures != nullptr || p.sampling.temperature == 0;
  if (status != cudaSuccess || (traversal && !may_be_greedy)) return status;
  return launch_blocks(tree_kernel<TopDown>, job, p.batch, shared, stream);
}

}  // namespace specdec::cuda
