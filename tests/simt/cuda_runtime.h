#pragma once
// Enough of CUDA's runtime for g++ to compile csrc/cuda/*.cu and for a CPU to run them. The threads
// of a cluster are fibers on one operating-system thread: they meet at barriers and in warps as on
// a device. Not here: memory order (an atomic is seen at once), loops that wait for memory without
// an atomic, and blocks of different clusters at the same time unless the launch is cooperative.
#include <cstddef>
#include <cstdint>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)
// Empty, because the C++ library spells its own attributes with this name.
#define __noinline__
#define __shared__ _Pragma("GCC error \"static shared memory is not in the shim\"")
#define __cluster_dims__(...) _Pragma("GCC error \"give the cluster as a launch attribute\"")

#include "atomics.h"
#include "barrier.h"
#include "launch.h"
#include "scalar.h"
#include "vector_types.h"
#include "warp.h"

inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}
