// A meeting point for the threads of a parallel region: they spin for a moment, then sleep.
//
// OpenMP's own barrier spins for milliseconds unless the environment said otherwise before it was loaded. If the thread
// that is waited for is not running, because another process has its processor, that is all the time there is.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace {

class Barrier {
 public:
  // Returns when `team` threads have called it, and makes what they wrote before visible to all of them.
  void wait(int team) {
    if (team == 1) return;
    const uint32_t round = round_.load();
    if (arrived_.fetch_add(1) + 1 == team) {
      arrived_.store(0);
      round_.store(round + 1);
      if (sleeping_.load() > 0) wake();
      return;
    }
    constexpr int kTurns = 4000;  // some 50 to 200 microseconds: what a sleep costs
    for (int i = 0; i < kTurns; ++i) {
      if (round_.load(std::memory_order_acquire) != round) return;
      pause();
    }
    sleeping_.fetch_add(1);
    while (round_.load() == round) sleep(round);
    sleeping_.fetch_sub(1);
  }

 private:
  static void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

#if defined(__linux__)
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel looks at the number itself");
  void sleep(uint32_t round) { syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, round, nullptr, nullptr, 0); }
  void wake() { syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
  void sleep(uint32_t) { std::this_thread::yield(); }
  void wake() {}
#endif

  std::atomic<int> arrived_{0}, sleeping_{0};
  std::atomic<uint32_t> round_{0};
};

}  // namespace
