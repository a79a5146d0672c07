#pragma once
// SPECDEC_HD marks inline functions that host and device code share, SPECDEC_NOINLINE those among
// them that device code calls.
#ifdef __CUDACC__
#define SPECDEC_HD __host__ __device__
#define SPECDEC_NOINLINE __noinline__
#else
#define SPECDEC_HD
#define SPECDEC_NOINLINE
#endif
