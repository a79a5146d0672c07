#pragma once
// How the library that is built runs a kernel.
#ifdef SPECDEC_HOST
#include "host/launch.h"
#else
#include "torch/launch.h"
#endif
