// FlashInfer's chain speculative sampling for callers without C++, compiled against its headers.
#include <cstdint>
#include <flashinfer/sampling.cuh>

// Probabilities are [batch, gamma, vocab] of the draft and [batch, gamma+1, vocab] of the target.
// `accepted` and `emitted` [batch] are added to. `seed` and `offset` are one number each, on the
// device. Returns a cudaError_t.
extern "C" int flashinfer_chain(float* draft, int* draft_tokens, float* target, int* tokens,
                                int* accepted, int* emitted, uint32_t batch, uint32_t gamma,
                                uint32_t vocab, uint64_t* seed, uint64_t* offset, void* stream) {
  return flashinfer::sampling::ChainSpeculativeSampling<float, int>(
      draft, draft_tokens, target, tokens, accepted, emitted, batch, gamma, vocab,
      /*deterministic=*/true, seed, /*seed_val=*/0, offset, /*offset_val=*/0,
      static_cast<cudaStream_t>(stream));
}
