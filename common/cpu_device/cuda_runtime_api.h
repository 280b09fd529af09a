// CUDA splits its runtime into a C API and C++ templates over it; the CPU device has one header for both.
#pragma once

#include "cuda_runtime.h"
