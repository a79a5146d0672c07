// FlashInfer's kernels for callers without C++, compiled against its headers.
#include <cstddef>
#include <cstdint>
#include <flashinfer/sampling.cuh>
#include <flashinfer/topk.cuh>

// All tensors are contiguous and on the device; rows of probabilities and logits are float32.
// `seed` and `offset` are one number each. Each function returns a cudaError_t.
namespace sampling = flashinfer::sampling;

extern "C" {

// Probabilities are [batch, gamma, vocab] of the draft and [batch, gamma+1, vocab] of the target.
// `accepted` and `emitted` [batch] are added to.
int flashinfer_chain(float* draft, int* draft_tokens, float* target, int* tokens, int* accepted,
                     int* emitted, uint32_t batch, uint32_t gamma, uint32_t vocab, uint64_t* seed,
                     uint64_t* offset, void* stream) {
  return sampling::ChainSpeculativeSampling<float, int>(
      draft, draft_tokens, target, tokens, accepted, emitted, batch, gamma, vocab,
      /*deterministic=*/true, seed, /*seed_val=*/0, offset, /*offset_val=*/0,
      static_cast<cudaStream_t>(stream));
}

// [rows, vocab], the softmax of logits / temperature [rows].
int flashinfer_softmax(float* logits, float* probs, float* temperature, void* workspace,
                       size_t workspace_bytes, uint32_t rows, uint32_t vocab, void* stream) {
  return sampling::OnlineSoftmax<float>(logits, probs, rows, vocab, temperature,
                                        /*temperature_val=*/1.0f, workspace, workspace_bytes,
                                        /*enable_pdl=*/true, static_cast<cudaStream_t>(stream));
}

// Probabilities of the likeliest `top_k` [rows] tokens. `states` is 1 MiB of zeros.
int flashinfer_top_k_renorm(float* probs, float* renormed, int* top_k, void* states, uint32_t rows,
                            uint32_t vocab, void* stream) {
  return sampling::RadixTopKRenormProbMultiCTA<float, int>(
      probs, renormed, top_k, rows, /*top_k_val=*/0, vocab,
      static_cast<sampling::RadixRowState*>(states), /*deterministic=*/true,
      static_cast<cudaStream_t>(stream));
}

int flashinfer_top_p_renorm(float* probs, float* renormed, float* top_p, uint32_t rows,
                            uint32_t vocab, void* stream) {
  return sampling::TopPRenormProb<float>(probs, renormed, top_p, rows, /*top_p_val=*/1.0f, vocab,
                                         static_cast<cudaStream_t>(stream));
}

// The `k` largest of each row in order, values and indices [rows, k].
int flashinfer_top_k(float* values, int* indices, float* largest, void* states, uint32_t rows,
                     uint32_t k, uint32_t vocab, void* stream) {
  return sampling::TopKDispatch<float, int>(
      values, indices, largest, rows, k, vocab, static_cast<sampling::RadixRowState*>(states),
      /*sorted_output=*/true, /*deterministic=*/true, sampling::TopKTieBreak::None,
      static_cast<cudaStream_t>(stream));
}

// A token of each row. Few rows are split among the blocks of clusters.
int flashinfer_top_p_sample(float* probs, float* top_p, int* tokens, uint32_t rows, uint32_t vocab,
                            uint64_t* seed, uint64_t* offset, void* stream) {
  return sampling::TopPSamplingFromProb<float, int>(
      probs, tokens, /*valid=*/nullptr, /*indices=*/nullptr, top_p, rows, /*top_p_val=*/1.0f, vocab,
      /*deterministic=*/true, seed, /*seed_val=*/0, offset, /*offset_val=*/0,
      static_cast<cudaStream_t>(stream));
}

int flashinfer_top_k_top_p_sample(float* probs, int* top_k, float* top_p, int* tokens,
                                  uint32_t rows, uint32_t vocab, uint64_t* seed, uint64_t* offset,
                                  void* stream) {
  return sampling::TopKTopPSamplingFromProb<float, int>(
      probs, top_k, top_p, tokens, /*valid=*/nullptr, /*indices=*/nullptr, rows, /*top_k_val=*/0,
      /*top_p_val=*/1.0f, vocab, /*deterministic=*/true, seed, /*seed_val=*/0, offset,
      /*offset_val=*/0, static_cast<cudaStream_t>(stream));
}

}  // extern "C"
