// The sleeping threads and their WaitWords. There is one table for all ranks: simulated processes
// share one address space, so a word has the same address in all of them.
//
// Threads: only the thread that the simulator runs. Blocking: never.
#pragma once

#include <algorithm>
#include <vector>

#include "cadre/core/os/wait_word.h"

namespace cadre::sim {

class SleepingThreads {
 public:
  // One thread's sleep, from construction to destruction.
  class Sleep {
   public:
    // Increments WaitWord::sleepers, as the native System does: a thread that changes the word may
    // skip wake() when no thread sleeps on it.
    Sleep(SleepingThreads& words, os::WaitWord& word) : sleeping_threads_(words), word_(&word) {
      word_->sleepers.fetch_add(1);
      sleeping_threads_.sleeps_.push_back(this);
    }
    ~Sleep() {
      std::erase(sleeping_threads_.sleeps_, this);
      word_->sleepers.fetch_sub(1);
    }
    Sleep(const Sleep&) = delete;
    Sleep& operator=(const Sleep&) = delete;

    bool is_over() const { return is_over_; }

   private:
    friend class SleepingThreads;
    SleepingThreads& sleeping_threads_;
    os::WaitWord* word_;
    bool is_over_ = false;
  };

  void wake(const os::WaitWord& word) {
    for (Sleep* sleep : sleeps_) sleep->is_over_ |= sleep->word_ == &word;
  }

 private:
  std::vector<Sleep*> sleeps_;
};

}  // namespace cadre::sim
