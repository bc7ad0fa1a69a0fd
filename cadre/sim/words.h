// Who sleeps on which WaitWord. One table for all ranks: a word's address is the same for all of
// them, because simulated processes share one address space.
//
// Threads: the holder of the baton. Blocking: never.
#pragma once

#include <algorithm>
#include <vector>

#include "cadre/os/wait_word.h"

namespace cadre::sim {

class Words {
 public:
  // One thread's sleep, from construction to destruction.
  class Sleep {
   public:
    // Counts itself in the word, as the native System does: who rings may skip the call of wake()
    // when nobody sleeps.
    Sleep(Words& words, os::WaitWord& word) : words_(words), word_(&word) {
      word_->sleepers.fetch_add(1);
      words_.sleeps_.push_back(this);
    }
    ~Sleep() {
      std::erase(words_.sleeps_, this);
      word_->sleepers.fetch_sub(1);
    }
    Sleep(const Sleep&) = delete;
    Sleep& operator=(const Sleep&) = delete;

    bool is_over() const { return is_over_; }

   private:
    friend class Words;
    Words& words_;
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
