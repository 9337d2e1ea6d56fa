// A pool that runs one function on all its threads at once, with a barrier between the steps inside.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

struct Range {
  int begin, end;
};

// The part of [0, n) that falls to thread `tid`.
inline Range share(int n, int tid, int threads) {
  return {int(int64_t(n) * tid / threads), int(int64_t(n) * (tid + 1) / threads)};
}

// Waiting spins for a bounded time (the next step of a pass is microseconds away), then parks in the kernel.
class Event {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }
  void advance();
  void wait_past(uint32_t seen, int64_t spin_ns);

 private:
  std::atomic<uint32_t> word_{0};
  std::atomic<int> sleepers_{0};
};

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return threads_; }
  // Runs body(thread) for every thread id in [0, size()), the caller being thread 0; one caller at a time.
  void run(const std::function<void(int)>& body);
  // Inside run(): returns once every thread has arrived.
  void barrier();

 private:
  void work(int id);

  const int threads_;
  const int process_;  // a forked child has none of the workers and must not wait for them
  std::mutex busy_;
  std::vector<std::thread> workers_;
  const std::function<void(int)>* body_ = nullptr;
  std::atomic<bool> stop_{false};
  Event start_, done_, step_;
  std::atomic<int> arrived_{0}, finished_{0};
};

}  // namespace paceline
