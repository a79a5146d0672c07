#pragma once
// Marks inline functions that host and device code share.
#ifdef __CUDACC__
#define SPECDEC_HD __host__ __device__
#else
#define SPECDEC_HD
#endif
