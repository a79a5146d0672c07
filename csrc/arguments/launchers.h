#pragma once
// The kernels of an op. Those for CUDA are null where the library is built without them.
#include <cstdint>

#include "specdec/parallel.h"

namespace specdec {

// An op whose CUDA kernels need scratch memory.
template <class OpParams>
struct Launchers {
  void (*cpu)(const OpParams&, const Parallel&);
  int64_t (*workspace_bytes)(const OpParams&);
  int (*cuda)(const OpParams&, void* workspace, void* stream);
};

// An op that needs no scratch memory.
template <class OpParams>
struct PlainLaunchers {
  void (*cpu)(const OpParams&, const Parallel&);
  int (*cuda)(const OpParams&, void* stream);
};

#ifdef SPECDEC_WITH_CUDA
#define SPECDEC_LAUNCHERS(OpParams, op) \
  specdec::Launchers<OpParams> { cpu::op, cuda::workspace_bytes, cuda::op }
#define SPECDEC_PLAIN_LAUNCHERS(OpParams, op) \
  specdec::PlainLaunchers<OpParams> { cpu::op, cuda::op }
#else
#define SPECDEC_LAUNCHERS(OpParams, op) \
  specdec::Launchers<OpParams> { cpu::op, nullptr, nullptr }
#define SPECDEC_PLAIN_LAUNCHERS(OpParams, op) \
  specdec::PlainLaunchers<OpParams> { cpu::op, nullptr }
#endif

}  // namespace specdec
