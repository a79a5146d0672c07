#pragma once
// The tensors of the library that is built. The files of this folder are compiled for _C.so with
// PyTorch's tensors, for specdec_host with NumPy's arrays, and for the C interface with its own.
#if defined(SPECDEC_HOST)
#include "host/tensor.h"
#elif defined(SPECDEC_C_INTERFACE)
#include "c/tensor.h"
#else
#include "torch/tensor.h"
#endif
