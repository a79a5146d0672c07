#pragma once
// The first launch of verify_tree: blocks measure the target rows after the root and after every
// node, and each draft row once. The last block of a row makes its summary.
#include "cuda/tree/sequence.cuh"

namespace specdec::cuda {

using TreeRowsShared = UnitShared<TreeSequence>;

// The first node whose draft row is that of node n. For one warp; in every lane.
inline __device__ int64_t first_with_row_of(const TreeParams& p, int64_t b, int64_t n) {
  if (!p.draft_rows.given()) return n;
  const int64_t row = p.draft_row(b, n);
  for (int64_t first = 0; first < n; first += kLanes) {
    const int64_t m = first + lane_id();
    const unsigned same = __ballot_sync(kAllLanes, m < n && p.draft_row(b, m) == row);
    if (same != 0) return first + __ffs(static_cast<int>(same)) - 1;
  }
  return n;
}

// Whether the row after a node may be looked at: no token follows an end-of-sequence token.
inline __device__ bool needs_row(const TreeParams& p, const TreeSequence& s, int64_t node) {
  if (s.nothing_to_verify || s.max_tokens == 0) return false;
  return node < 0 || (is_node(p, s, node) && !is_eos(p, p.drafted(s.b, node)));
}

// How many nodes lie on the path to the row after a node. The parents of a node that cannot be
// reached may be anything.
inline __device__ int64_t depth_after(const TreeParams& p, int64_t b, int64_t node) {
  int64_t depth = 0;
  while (node >= 0) {
    const int64_t parent = p.parent(b, node);
    node = parent < node ? parent : kNone;
    ++depth;
  }
  return depth;
}

__forceinline__ __device__ void open_unit(const TreeJob& job, TreeRowsShared& s) {
  const TreeParams& p = job.p;
  const RowUnit unit = own_unit(p.batch, p.nodes + 1, true, job.measures_drafts, job.splits);
  if (thread_id() == 0) open(p, unit.b, s.sequence);
  __syncthreads();
  if (warp_id() != 0) return;
  const TreeSequence& q = s.sequence;
  const int64_t node = unit.is_draft ? unit.i : unit.i - 1;
  bool exists;
  if (unit.is_draft) {
    exists =
        measures_drafts(job, q) && unit.i < q.nodes && has_row(p.draft, p.draft_row(q.b, node));
    const int64_t first = exists ? first_with_row_of(p, q.b, node) : node;
    if (exists && unit.split == 0 && lane_id() == 0) {
      job.first_of_row[q.b * p.nodes + node] = static_cast<int32_t>(first);
    }
    exists = exists && first == node;
  } else {
    exists = unit.i <= q.nodes && needs_row(p, q, node);
  }
  if (lane_id() != 0) return;
  s.exists = exists;
  if (!exists) return;
  const int64_t slot = job.slot(unit);
  s.unit = unit;
  s.slot = slot;
  begin_arrivals(job.tickets + slot, job.launch_id, job.splits);
  open_unit(p, q, unit, unit.is_draft ? p.draft_row(q.b, node) : unit.i,
            p.rule == TreeRule::kMatch ? depth_after(p, q.b, node) : 0, job.tile_stats[slot],
            want_of(p, q), job.list(q.b, node), s.task);
}

// Whether children may be tried on the row after a node: its own, or those of another node with its
// token, because nodes with equal paths continue one text. For the whole block.
inline __device__ bool may_try_children(const TreeParams& p, const TreeSequence& s, int64_t node) {
  bool found = false;
  for (int64_t n = thread_id(); n < s.nodes && !found; n += kThreads) {
    const int64_t parent = p.parent(s.b, n);
    if (!is_child(p, s.b, n, parent)) continue;
    found = parent == node ||
            (node >= 0 && parent >= 0 && p.drafted(s.b, parent) == p.drafted(s.b, node));
  }
  return __syncthreads_or(found) != 0;
}

// That run at once on a multiprocessor. With as many as for chains, code for other devices than
// sm_90 spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int kTreeRowsBlocks = 2;
#else
constexpr int kTreeRowsBlocks = kBlocksWithFewRegisters;
#endif

__global__ void __launch_bounds__(kThreads, kTreeRowsBlocks)
    tree_rows_kernel(const __grid_constant__ TreeJob job) {
  auto& s = *shared_memory<TreeRowsShared>();
  ThreadBlock block(s);
  open_unit(job, s);
  __syncthreads();
  if (!s.exists) return;
  fill_tile_stats(s.task);
  if (!arrive(s.arrival, job.tickets + s.slot, job.splits, false).last) return;
  RowSummary& out = s.summary;
  summarise(block, s.task, candidates_of<TreeRowsShared>(), out);
  __syncthreads();
  const TreeSequence& q = s.sequence;
  if (job.p.rule == TreeRule::kTypical && !q.greedy && !s.unit.is_draft && out.stats.valid &&
      may_try_children(job.p, q, s.unit.i - 1)) {
    const double found = entropy(block, s.task, out.stats);
    if (thread_id() == 0) out.asked = found;
  }
  if (thread_id() == 0) job.summaries[s.slot] = out;
}

}  // namespace specdec::cuda
