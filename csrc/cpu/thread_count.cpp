#include "cpu/thread_count.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>

#include "cpu/threads.h"

namespace specdec::cpu {
namespace {

int threads_at_first() {
  const char* asked = std::getenv("OMP_NUM_THREADS");
  const long n = asked != nullptr ? std::strtol(asked, nullptr, 10) : 0;
  if (n > 0) return static_cast<int>(std::min(n, 1024L));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::atomic<int>& wanted() {
  static std::atomic<int> threads{threads_at_first()};
  return threads;
}

}  // namespace

int num_threads() { return wanted(); }
void set_num_threads(int n) { wanted() = n; }

Parallel counted() { return pooled(num_threads()); }

}  // namespace specdec::cpu
