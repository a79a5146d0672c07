#pragma once

namespace specdec::cpu {

// Instruction sets that kernels are built for; each includes those before it.
enum class Capability { kPlain, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16 };

// The widest one that this processor runs and SPECDEC_CPU_CAPABILITY allows.
Capability capability();

}  // namespace specdec::cpu
