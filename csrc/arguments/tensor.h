#pragma once
// The tensors of the library that is built. The files of this folder are compiled twice: for _C.so
// with PyTorch's tensors, and for specdec_host with NumPy's arrays.
#ifdef SPECDEC_HOST
#include "host/tensor.h"
#else
#include "torch/tensor.h"
#endif
