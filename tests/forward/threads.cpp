// Calls of csrc/cpu/threads.cpp: alone, one inside another, from several threads, and in a child.
#include "cpu/threads.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

constexpr std::chrono::microseconds kMoment{20};  // in which the caller does the other parts

// Whether each of n is done once, and an exception of a part arrives.
bool once(int threads, int64_t n, int nested, bool fails = false) {
  std::vector<int> done(n), inner(n, 1);
  const std::thread::id caller = std::this_thread::get_id();
  try {
    specdec::cpu::pooled(threads)(n, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (std::this_thread::get_id() != caller) std::this_thread::sleep_for(kMoment);
        ++done[i];
        if (nested > 0) inner[i] = once(threads, 5, nested - 1);
      }
      if (fails && end == n) throw std::runtime_error("part");
    });
  } catch (const std::runtime_error&) {
    fails = false;
  }
  return done == std::vector<int>(n, 1) && inner == done && !fails;
}

bool always() {
  bool right = true;
  for (int i = 1; i < 400; ++i) right &= once(1 + i % 4, i % 37 + 1, i % 2, i % 7 == 0);
  return right;
}

int main() {
  bool right = always(), others = true;
  std::thread other([&] { others = always(); });
  right &= always();
  other.join();
#ifndef __SANITIZE_THREAD__  // which follows no threads into a child
  int status = 1;
  const pid_t child = fork();
  if (child == 0) _exit(!always());
  waitpid(child, &status, 0);
  right &= status == 0;
#endif
  return !(right && others);
}
