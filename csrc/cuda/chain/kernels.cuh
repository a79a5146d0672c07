#pragma once
// The kernels of verify_chain, each compiled by itself.
#include "cuda/chain/view.cuh"
#include "cuda/launch.cuh"

namespace specdec::cuda {

struct ChainKernel {
  void (*entry)(ChainJob);
  int blocks_per_processor;  // that run at once on a multiprocessor
  Devices* devices;

  cudaError_t device(Device* out) const {
    return devices->current(entry, blocks_per_processor, out);
  }
};

ChainKernel general_chain_kernel();
ChainKernel logits_chain_kernel();
ChainKernel probs_chain_kernel();

inline ChainKernel chain_kernel_of(Variant variant) {
  switch (variant) {
    case Variant::kLogits:
      return logits_chain_kernel();
    case Variant::kProbs:
      return probs_chain_kernel();
    default:
      return general_chain_kernel();
  }
}

}  // namespace specdec::cuda
