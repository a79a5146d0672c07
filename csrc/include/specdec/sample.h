#pragma once
// Samples one token from each of R rows of logits in one fused pass.
#include "specdec/parallel.h"
#include "specdec/philox.h"
#include "specdec/sampling.h"

namespace specdec {

struct SampleParams {
  Rows logits;               // [R, V]; stride_sequence steps from row to row
  SamplingParams sampling;   // [R] each
  const int64_t* seeds;      // [R]
  const int64_t* positions;  // [R]
  int64_t* tokens;           // [R]
  float* logprobs;           // [R]
  double* logsumexp;         // [R]
  float* threshold;          // [R]
  int32_t* status;           // [R]
  int64_t num_rows;          // R
  int64_t vocab;
  uint32_t stream;  // NoiseStream
  bool gumbel;      // Gumbel-max sampling, else inverse CDF
};

namespace cpu {
void sample(const SampleParams& p, const Parallel& parallel);
}  // namespace cpu

// A cudaError_t as int, so that this header needs no CUDA toolkit; `stream` is a cudaStream_t.
namespace cuda {
int64_t workspace_bytes(const SampleParams& p);  // device memory, which need not be cleared
int sample(const SampleParams& p, void* workspace, void* stream);
}  // namespace cuda

}  // namespace specdec
