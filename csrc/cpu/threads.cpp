#include "cpu/threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace specdec::cpu {
namespace {

using Body = void (*)(void* context, int64_t begin, int64_t end);
using Clock = std::chrono::steady_clock;

// Waking a sleeping thread takes as long as a small product, so threads wait awake from one op of a
// forward to the next. A longer wait has lost its processor or has nothing to wait for.
constexpr std::chrono::microseconds kAwake{1000};

void pause() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether it came true while this thread waited awake. Between two looks a worker without work
// yields to others, such as a thread of PyTorch's that the caller waits for: without that torch.sin
// after a product took up to the whole of the time. A caller would give a neighbour's process a
// slice of time for a wait of microseconds.
template <class F>
bool awaited(F&& f, bool yields) {
  const Clock::time_point end = Clock::now() + kAwake;
  do {
    for (int i = 0; i < 16; ++i) {
      if (f()) return true;
      pause();
    }
    if (yields) std::this_thread::yield();
  } while (Clock::now() < end);
  return false;
}

class Pool {
 public:
  void run(int64_t n, int64_t threads, Body body, void* context) {
    if (busy_.test_and_set(std::memory_order_acquire)) return body(context, 0, n);
    add_workers(threads - 1);
    job_ = {body, context, n, std::min(n, threads)};
    unfinished_ = job_.parts;
    unclaimed_ = Unclaimed{job_.parts, threads - 1}.word();
    if (sleeping_ > 0) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
      }
      wake_.notify_all();
    }
    while (run_part(-1)) continue;
    const auto finished = [this] { return unfinished_ == 0; };
    if (!awaited(finished, false)) {
      std::unique_lock<std::mutex> lock(mutex_);
      waiting_ = true;
      finished_.wait(lock, finished);
      waiting_ = false;
    }
    const std::exception_ptr error = std::exchange(error_, nullptr);
    busy_.clear(std::memory_order_release);
    if (error) std::rethrow_exception(error);
  }

 private:
  struct Job {
    Body body = nullptr;
    void* context = nullptr;
    int64_t n = 0, parts = 0;
  };

  // In one word, so that whoever claims a part has claimed it of the job that is running now.
  struct Unclaimed {
    int64_t parts, workers;  // the first `workers` may help

    static Unclaimed of(uint64_t word) {
      return {static_cast<int64_t>(word >> 16), static_cast<int64_t>(word & 0xffff)};
    }
    uint64_t word() const {
      return static_cast<uint64_t>(parts) << 16 | static_cast<uint64_t>(workers);
    }
    bool for_worker(int64_t worker) const { return parts > 0 && worker < workers; }
  };

  // Where no more threads can be created, those that exist and the caller do all parts.
  void add_workers(int64_t wanted) {
    try {
      for (; workers_ < wanted; ++workers_) {
        std::thread([this, worker = workers_] { work(worker); }).detach();
      }
    } catch (...) {
    }
  }

  void work(int64_t worker) {
    const auto wanted = [&] { return Unclaimed::of(unclaimed_).for_worker(worker); };
    for (;;) {
      while (run_part(worker)) continue;
      if (awaited(wanted, true)) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleeping_;
      wake_.wait(lock, wanted);
      --sleeping_;
    }
  }

  bool run_part(int64_t worker) {
    uint64_t word = unclaimed_;
    Unclaimed unclaimed;
    do {
      unclaimed = Unclaimed::of(word);
      if (!unclaimed.for_worker(worker)) return false;
      --unclaimed.parts;
    } while (!unclaimed_.compare_exchange_weak(word, unclaimed.word()));
    const Job job = job_;  // which stays until this part is finished
    const int64_t part = job.parts - 1 - unclaimed.parts;
    try {
      job.body(job.context, job.n * part / job.parts, job.n * (part + 1) / job.parts);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
    if (--unfinished_ == 0 && waiting_) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
      }
      finished_.notify_one();
    }
    return true;
  }

  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;  // for the whole of a call
  std::atomic<uint64_t> unclaimed_{0};
  std::atomic<int64_t> unfinished_{0};
  Job job_;              // of the caller while no part of it is unfinished
  int64_t workers_ = 0;  // of the caller
  std::mutex mutex_;     // of those who sleep, and of the error
  std::condition_variable wake_, finished_;
  std::atomic<int64_t> sleeping_{0};
  std::atomic<bool> waiting_{false};
  std::exception_ptr error_;
};

// Never destroyed, because its threads run until the process ends.
Pool* pool = nullptr;

// The child of a fork has none of its parent's threads, and their locks may be held for ever.
void renew() { pool = new Pool; }

Pool& the_pool() {
  static const bool made = [] {
    renew();
    pthread_atfork(nullptr, nullptr, renew);
    return true;
  }();
  (void)made;
  return *pool;
}

}  // namespace

Parallel pooled(int threads) {
  return {[](void* self, int64_t n, Body body, void* context) {
            the_pool().run(n, reinterpret_cast<intptr_t>(self), body, context);
          },
          reinterpret_cast<void*>(intptr_t{threads}), threads};
}

}  // namespace specdec::cpu
