#pragma once
// A SIMT emulator: CUDA source compiled for the CPU, threads as fibers.
//
// This header takes the place of CUDA's, so that g++ compiles csrc/cuda/**/*.cu and a CPU runs
// them. The threads of a block are fibers on one operating-system thread, which meet at barriers
// and in warp-wide operations as on a device. Launches that would fail or hang on a device fail
// with a message. Results do not show faults of memory order, because every write is visible at
// once: ThreadSanitizer does, in sanitized.cpp. Loops that wait for memory without an atomic are
// not supported. The emulator runs as many blocks in turns as a test asks for, one after the other
// by default; threads of different blocks take turns at barriers and at atomics.
//
// fiber.h     stacks, and switching between them
// schedule.h  which thread runs next
// launch.h    checks of a launch, and its waves of blocks
// barrier.h   __syncthreads and its relatives
// warp.h      shuffles, votes and reductions
// shared.h    dynamic shared memory, poisoned and between canaries
// atomics.h, scalar.h, vector_types.h   functions and types of one thread
// host.h      device attributes and errors
// watch.h     what ThreadSanitizer is told
#include <cstddef>
#include <cstdint>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)
// Empty, because the C++ standard library uses this name in its own attributes.
#define __noinline__
#define __shared__ _Pragma("GCC error \"static shared memory is not emulated\"")

#include "atomics.h"
#include "barrier.h"
#include "launch.h"
#include "scalar.h"
#include "vector_types.h"
#include "warp.h"
