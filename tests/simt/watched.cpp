// The code of the emulator, which the lane of ThreadSanitizer compiles without it and links first:
// of the functions that every object file has, the linker takes these copies.
#include "cuda_runtime.h"

namespace simt {

// Whatever a kernel calls of it, see SIMT_UNWATCHED. What is named here is compiled.
struct Unwatchable {
  decltype(&arrive) barrier = arrive;
  decltype(&meet) collective = meet;
  decltype(&run) launch = run;
  const Collective* const collectives[9] = {&kSyncWarp,   &kShuffle,   &kShuffleUp,
                                            &kShuffleXor, &kBallot,    &kAny,
                                            &kAll,        &kReduceAdd, &kReduceMax};
  decltype(&Scheduler::observable) atomic = &Scheduler::observable;
};
[[gnu::used]] const Unwatchable unwatchable;

}  // namespace simt
