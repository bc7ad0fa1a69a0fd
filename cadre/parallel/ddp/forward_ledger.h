// The forwards of one rank that no backward has gone through yet, by which a rank that left out a
// step is found.
//
// Threads: one. Blocking: never. Lifetime: keeps no graph. Errors: none.
// A step is what one synchronized backward reduces: any number of forwards. A forward that is
// older than the forwards of a backward, and that no backward has gone through, was left behind: by
// an exception in the forward or in the loss, or by a program that skipped its backward. Ranks that
// left behind different numbers of forwards are not in the same step. Forwards under no_sync() are
// not entered, because ranks may accumulate as many as they like.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace cadre {

// What the hooks of a forward's outputs share.
struct Forward {
  int64_t number = 0;       // from 1; 0 under no_sync()
  bool is_reduced = false;  // one backward may go through it; a second one is a mistake
  std::optional<int64_t> num_samples = {};  // nullopt: not weighted, or added up already
};

class ForwardLedger {
 public:
  std::shared_ptr<Forward> enter(std::optional<int64_t> num_samples);
  int64_t last_number() const { return last_number_; }

  // A backward goes through the forward.
  void take(int64_t number);
  // Forwards left behind by a backward whose newest forward has this number; `dropped_only`: of
  // those, the ones whose outputs are gone, which no running backward can still reach.
  int32_t num_left_behind(int64_t number, bool dropped_only) const;
  // All ranks have left behind as many as this one: they do not count again.
  void forgive_before(int64_t number);

  // Of all forwards that are entered and not taken.
  int64_t num_samples() const;

 private:
  struct Entry {
    int64_t number;
    int64_t num_samples;
    std::weak_ptr<Forward> forward;
  };

  int64_t last_number_ = 0;
  std::vector<Entry> entries_;  // by number
};

}  // namespace cadre
