#pragma once
// How the library that is built runs a kernel.
#if defined(SPECDEC_HOST)
#include "host/launch.h"
#elif defined(SPECDEC_C_INTERFACE)
#include "c/launch.h"
#else
#include "torch/launch.h"
#endif
