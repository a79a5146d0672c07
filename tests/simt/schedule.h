#pragma once
// The scheduler of the fibers. A wave is the set of blocks that run in turns. A thread runs until
// it has to wait for another one.
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "vector_types.h"
#include "watch.h"

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace simt {

inline bool reverse = false;       // threads run from the last one of the last block to the first
inline uint64_t shuffle_seed = 0;  // if not 0, threads run in a random order, new at every barrier
inline unsigned blocks_at_once = 1;  // how many blocks of a launch run in turns

struct Collective;
struct Block;

struct Thread {
  Block* block;
  Fiber* fiber;
  const char* waits_at;  // the operation at which it waits, or null
  dim3 index;
  unsigned rank;  // in its block
  Watch watch;
};

// The places of two meetings: the threads that are ahead come to the next one while others have not
// left this one.
struct Meetings {
  char places[2];
  bool second;

  char* now() { return &places[second]; }
  void met() { second = !second; }
};

// The state of a barrier of a block.
struct Barrier {
  Thread* first;
  unsigned threads;
  unsigned arrived = 0, returned = 0, nonzero = 0, result = 0;
  const char* name = nullptr;  // the operation by which its first thread arrived
  Meetings order = {};
};

struct Warp {
  struct Lane {
    const Collective* what;
    uint32_t mask;
    unsigned source;
    uint64_t value, result;
  };
  Thread* first;
  uint32_t alive, waiting;
  Lane lanes[32];
  Meetings order;
};

struct Block {
  Barrier barrier;
  Warp* warps;
  unsigned char* shared;  // dynamic shared memory, between canaries
  dim3 index;
};

inline std::string text(const dim3& i) {
  return "(" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")";
}
inline std::string text(const Thread& t) {
  return "thread " + text(t.index) + " of block " + text(t.block->index);
}

class Scheduler {
 public:
  using Body = void (*)(const void*);

  std::vector<Thread> threads;
  Thread* current = nullptr;
  void (*returned)(Thread&) = nullptr;  // called when a thread has returned
  std::string failure;

  // Runs every thread to its end. Returns false and sets `failure` if the launch failed.
  bool run(Body body, const void* context) {
    body_ = body;
    context_ = context;
    started_ = finished_ = 0;
    stalled_ = 0;
    ready_.clear();
    order_.resize(threads.size());
    for (size_t i = 0; i < order_.size(); ++i) {
      order_[i] = &threads[reverse && !shuffle_seed ? order_.size() - 1 - i : i];
    }
    shuffle(order_);
    watch_ = current_watch();
    while (watches_.size() < threads.size()) watches_.push_back(new_watch());
    for (size_t i = 0; i < threads.size(); ++i) threads[i].watch = watches_[i];
    simt::release(&begin_);
    give_way(main_);
    leave_thread();
    idle_.insert(idle_.end(), used_.begin(), used_.end());
    used_.clear();
    if (failure.empty()) return true;
    // The stacks hold threads that will never be resumed.
    idle_.clear();
    fibers_.clear();
    return false;
  }

  [[noreturn]] void fail(const std::string& message) {
    failure = message;
    main_.resume();
  }

  // Whoever waits or has returned is no longer watched: the emulator goes on.
  void leave_thread() { switch_to(watch_); }

  // Suspends the current thread until it is released.
  void wait(const char* name) {
    current->waits_at = name;
    give_way(*current->fiber);
  }

  // Lets threads that waited run before all that are ready already. One warp thus gets as far ahead
  // of the others as the barriers allow, so that a missing barrier changes the result.
  void release(std::vector<Thread*>& group) {
    stalled_ = 0;
    shuffle(group);
    const bool last_first = reverse && !shuffle_seed;
    const bool ahead = !shuffle_seed || draw(4) != 0;
    const size_t n = group.size();
    for (size_t i = 0; i < n; ++i) {
      Thread* const t = group[last_first == ahead ? i : n - 1 - i];
      ahead ? ready_.push_front(t) : ready_.push_back(t);
    }
  }

  // Called by every operation that other threads can observe at once, such as an atomic.
  SIMT_UNWATCHED void observable(uint64_t cost = 1) {
    stalled_ += cost;
    if (stalled_ > kStalled) fail("livelock: " + text(*current) + " and others wait in loops");
    if (stalled_ % kPatience < cost || (shuffle_seed && draw(4) == 0)) {
      leave_thread();
      ready_.push_back(current);
      give_way(*current->fiber);
    }
  }

  uint64_t draw(uint64_t below) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (state_ >> 33) % below;
  }
  void seed(uint64_t seed) { state_ = seed * 0x9E3779B97F4A7C15u; }

  template <class T>
  void shuffle(std::vector<T>& items) {
    if (!shuffle_seed) return;
    for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[draw(i)]);
  }

 private:
  static constexpr uint64_t kPatience = 4096;  // atomics until another thread runs
  static constexpr uint64_t kStalled =
      1u << 25;  // atomics without any thread returning or being released

  static void enter(Fiber& self);

  bool starts_next() {
    return started_ < order_.size() && (ready_.empty() || (shuffle_seed && draw(2) == 0));
  }

  void start_next(Fiber& self) {
    Thread& t = *order_[started_++];
    t.fiber = &self;
    become(t);
    acquire(&begin_);
    body_(context_);
    simt::release(&end_);
    leave_thread();
    acquire(&end_);
    ++finished_;
    stalled_ = 0;
    returned(*current);
  }

  void work(Fiber& self) {
    for (;;) {
      start_next(self);
      while (!kWatched && starts_next()) start_next(self);
      (kWatched ? used_ : idle_).push_back(&self);
      give_way(self);
    }
  }

  void become(Thread& t) {
    current = &t;
    switch_to(t.watch);
    t.waits_at = nullptr;
    threadIdx = t.index;
    blockIdx = t.block->index;
  }

  void give_way(Fiber& self) {
    Fiber& next = choose();
    if (&next != &self) next.resume_from(self);
  }

  Fiber& choose() {
    if (starts_next()) return idle_fiber();
    if (ready_.empty()) {
      if (finished_ < threads.size()) fail(deadlock());
      return main_;
    }
    Thread& next = *ready_.front();
    ready_.pop_front();
    become(next);
    return *current->fiber;
  }

  // The fiber that became idle last, so that a launch that never waits runs on one stack.
  Fiber& idle_fiber() {
    if (idle_.empty()) {
      fibers_.push_back(std::make_unique<Fiber>(enter, static_cast<unsigned>(fibers_.size())));
      return *fibers_.back();
    }
    Fiber& fiber = *idle_.back();
    idle_.pop_back();
    return fiber;
  }

  std::string deadlock() const {
    std::map<std::string, std::vector<const Thread*>> places;
    for (const Thread& t : threads) {
      if (t.waits_at) places[t.waits_at].push_back(&t);
    }
    std::string message = "deadlock";
    for (const auto& [name, group] : places) {
      message += (message == "deadlock" ? ": " : "; ") + std::to_string(group.size()) +
                 " waiting at " + name + ", first " + text(*group.front());
    }
    return message;
  }

  Fiber main_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_, used_;
  std::vector<Watch> watches_;
  std::deque<Thread*> ready_;
  std::vector<Thread*> order_;
  size_t started_ = 0, finished_ = 0;
  uint64_t stalled_ = 0, state_ = 0;
  Watch watch_ = nullptr;     // of the emulator
  char begin_ = 0, end_ = 0;  // order what the emulator does before and after the threads
  Body body_ = nullptr;
  const void* context_ = nullptr;
};

inline Scheduler scheduler;

inline void Scheduler::enter(Fiber& self) { scheduler.work(self); }

}  // namespace simt
