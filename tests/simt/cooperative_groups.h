#pragma once
// The parts of CUDA's cooperative_groups that the kernels use.
#include "cuda_runtime.h"

namespace cooperative_groups {

class cluster_group {
 public:
  void sync() const { simt::arrive(cluster().barrier, simt::kSyncCluster); }
  unsigned block_rank() const { return simt::scheduler.current->block->rank; }
  unsigned num_blocks() const { return cluster().size; }

  // The address of the same variable in the shared memory of another block.
  template <class T>
  T* map_shared_rank(T* variable, int rank) const {
    return reinterpret_cast<T*>(simt::remote_shared(variable, static_cast<unsigned>(rank)));
  }

 private:
  static simt::Cluster& cluster() { return *simt::scheduler.current->block->cluster; }
};

inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups
