#pragma once
// What ThreadSanitizer is told where SIMT_WATCHED is defined: every CUDA thread is a thread of its
// own, and these operations alone order what two of them do. Shuffles and votes order nothing.
//   a barrier of a block, and __syncwarp, for those that meet there
//   an atomic that releases, for one that acquires the same word later
//   begin and end of a wave of blocks
// The emulator itself is one more thread, and is not compiled for ThreadSanitizer: watched.cpp
// holds its code, and every function that writes its state is marked SIMT_UNWATCHED, so that a
// kernel calls it there.

#ifdef SIMT_WATCHED

#define SIMT_UNWATCHED __attribute__((noipa))

extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}

namespace simt {

// On a stack that another thread has used, accesses of both would have no order.
constexpr bool kWatched = true;

using Watch = void*;
inline Watch current_watch() { return __tsan_get_current_fiber(); }
inline Watch new_watch() { return __tsan_create_fiber(0); }
// A switch orders nothing.
inline void switch_to(Watch watch) { __tsan_switch_to_fiber(watch, 1); }

// What this thread did before `release` comes before what another does after `acquire`.
inline void release(void* order) { __tsan_release(order); }
inline void acquire(void* order) { __tsan_acquire(order); }

}  // namespace simt

#else

#define SIMT_UNWATCHED

namespace simt {

constexpr bool kWatched = false;

using Watch = void*;
inline Watch current_watch() { return nullptr; }
inline Watch new_watch() { return nullptr; }
inline void switch_to(Watch) {}
inline void release(void*) {}
inline void acquire(void*) {}

}  // namespace simt

#endif
