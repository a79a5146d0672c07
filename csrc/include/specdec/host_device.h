#pragma once
// SPECDEC_HD marks inline functions that host and device code share, SPECDEC_NOINLINE those among
// them that device code calls, SPECDEC_ROLLED a loop that device code does not unroll.
#ifdef __CUDACC__
#define SPECDEC_HD __host__ __device__
#define SPECDEC_NOINLINE __noinline__
#else
#define SPECDEC_HD
#define SPECDEC_NOINLINE
#endif
#ifdef __CUDA_ARCH__
#define SPECDEC_ROLLED _Pragma("unroll 1")
#else
#define SPECDEC_ROLLED
#endif
