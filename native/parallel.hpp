// Independent pieces of work on several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

namespace deltawire {

// Calls work(0, scratch) … work(count - 1, scratch), each once, on at most `threads` threads, each
// with its own scratch. The first exception is rethrown when all threads have ended. If no thread
// can be started, the calling thread does all the work.
template <typename Scratch, typename Work>
void parallel(std::size_t count, unsigned threads, const Work& work) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  const auto run = [&] {
    try {
      Scratch scratch;
      for (std::size_t i = next++; i < count && !failed; i = next++) work(i, scratch);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  const std::size_t wanted = std::min<std::size_t>(threads, count);
  try {
    for (std::size_t i = 1; i < wanted; ++i) others.emplace_back(run);
  } catch (const std::exception&) {
    // Continue with the threads that could be started.
  }
  run();
  for (std::thread& other : others) other.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace deltawire
