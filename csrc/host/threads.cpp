#include "host/threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

namespace specdec {
namespace {

using Body = void (*)(void* context, int64_t begin, int64_t end);

// The ranges of one call, claimed one by one by whichever thread is free.
struct Job {
  Body body = nullptr;
  void* context = nullptr;
  int64_t n = 0, parts = 0, claimed = 0, done = 0;
  std::exception_ptr error;
};

class Pool {
 public:
  void run(int64_t n, int64_t threads, Body body, void* context) {
    const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    const int64_t parts = std::min(n, threads);
    if (!turn.owns_lock() || parts <= 1) return body(context, 0, n);
    std::unique_lock<std::mutex> lock(mutex_);
    add_workers(parts - 1);
    job_ = {body, context, n, parts, 0, 0, nullptr};
    wake_.notify_all();
    while (job_.claimed < job_.parts) run_part(lock);
    finished_.wait(lock, [this] { return job_.done == job_.parts; });
    const std::exception_ptr error = job_.error;
    job_ = {};
    if (error) std::rethrow_exception(error);
  }

 private:
  // Where no more threads can be created, those that exist and the caller do all parts.
  void add_workers(int64_t wanted) {
    try {
      for (; workers_ < wanted; ++workers_) std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
    }
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return job_.claimed < job_.parts; });
      run_part(lock);
    }
  }

  // Claims a part and runs it without the lock.
  void run_part(std::unique_lock<std::mutex>& lock) {
    const int64_t part = job_.claimed++;
    const Job job = job_;
    std::exception_ptr error;
    lock.unlock();
    try {
      job.body(job.context, job.n * part / job.parts, job.n * (part + 1) / job.parts);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error) job_.error = error;
    if (++job_.done == job_.parts) finished_.notify_one();
  }

  std::mutex turn_;   // held for the whole of a call
  std::mutex mutex_;  // guards all below
  std::condition_variable wake_, finished_;
  Job job_;
  int64_t workers_ = 0;
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

Parallel host_parallel() {
  const int threads = num_threads();
  return {[](void* self, int64_t n, Body body, void* context) {
            the_pool().run(n, reinterpret_cast<intptr_t>(self), body, context);
          },
          reinterpret_cast<void*>(intptr_t{threads}), threads};
}

}  // namespace specdec
