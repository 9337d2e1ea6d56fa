#include "thread_pool.h"

#include <unistd.h>

#include <chrono>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

// Longer than a barrier of a quiet machine takes, far shorter than a time slice: a thread that waits for one that is
// not running gives up its core, and the scheduler moves the other there.
constexpr int64_t kBarrierSpinNs = 15'000;
constexpr int64_t kIdleSpinNs = 600'000;  // covers the engine's work between two passes

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void Event::advance() {
  word_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

void Event::wait_past(uint32_t seen, int64_t spin_ns) {
  const int64_t give_up = now_ns() + spin_ns;
  for (;;) {
    for (int i = 0; i < 64; ++i) {
      if (value() != seen) return;
      relax();
    }
    if (now_ns() > give_up) break;
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (word_.load(std::memory_order_seq_cst) == seen) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
    std::this_thread::yield();
#endif
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

ThreadPool::ThreadPool(int threads) : threads_(threads < 1 ? 1 : threads), process_(int(getpid())) {
  for (int id = 1; id < threads_; ++id) workers_.emplace_back([this, id] { work(id); });
}

ThreadPool::~ThreadPool() {
  if (int(getpid()) != process_) {
    for (auto& worker : workers_) worker.detach();
    return;
  }
  stop_.store(true);
  start_.advance();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::run(const std::function<void(int)>& body) {
  const std::lock_guard<std::mutex> lock(busy_);
  if (threads_ == 1) return body(0);
  body_ = &body;
  finished_.store(0, std::memory_order_relaxed);
  const uint32_t seen = done_.value();
  start_.advance();
  body(0);
  if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 < threads_)
    done_.wait_past(seen, kBarrierSpinNs);
  else
    done_.advance();
}

void ThreadPool::work(int id) {
  uint32_t seen = 0;
  for (;;) {
    start_.wait_past(seen, kIdleSpinNs);
    ++seen;
    if (stop_.load()) return;
    (*body_)(id);
    if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) done_.advance();
  }
}

void ThreadPool::barrier() {
  if (threads_ == 1) return;
  const uint32_t seen = step_.value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
    arrived_.store(0, std::memory_order_relaxed);
    step_.advance();
  } else {
    step_.wait_past(seen, kBarrierSpinNs);
  }
}

}  // namespace paceline
