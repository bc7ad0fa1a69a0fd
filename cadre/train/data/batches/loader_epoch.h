// The loop over the batches of one epoch, and the check that a loader has one loop at a time.
//
// Threads: one. Blocking: as the loader. Lifetime: an epoch and its iterators borrow the loader.
// Errors: kInvalidArgument for a loop that has ended because another one was begun.
#pragma once

#include <cstddef>
#include <iterator>
#include <memory>
#include <string_view>
#include <utility>

#include "cadre/core/base/export.h"
#include "cadre/train/data/dataset.h"

namespace cadre::data {

// A token's address identifies the call of epoch() or begin() to which a loop belongs, even after
// another loader was assigned to the loader.
struct LoopToken {};

// The remaining batches of one epoch: `for (const auto& [x, y] : loader.epoch(e))`. The next call
// of epoch() or of the loader's function that sets its position ends the epoch, and the next
// begin() ends earlier iterators: the loops throw at their next batch.
template <typename Loader>
class LoaderEpoch {
 public:
  class Iterator {
   public:
    using difference_type = std::ptrdiff_t;
    using value_type = Batch;

    const Batch& operator*() const { return batch_; }
    const Batch* operator->() const { return &batch_; }
    Iterator& operator++() {
      is_at_end_ = !loader_->next(batch_, loop_);
      return *this;
    }
    void operator++(int) { ++*this; }
    friend bool operator==(const Iterator& it, std::default_sentinel_t) { return it.is_at_end_; }

   private:
    friend class LoaderEpoch;
    Iterator(Loader* loader, std::shared_ptr<const LoopToken> loop)
        : loader_(loader), loop_(std::move(loop)) {
      ++*this;
    }

    Loader* loader_;
    std::shared_ptr<const LoopToken> loop_;  // shared with the loader
    Batch batch_;
    bool is_at_end_ = false;
  };

  Iterator begin() const { return Iterator(loader_, loader_->begin_loop(epoch_)); }
  std::default_sentinel_t end() const { return {}; }

 private:
  friend Loader;
  LoaderEpoch(Loader* loader, std::shared_ptr<const LoopToken> epoch)
      : loader_(loader), epoch_(std::move(epoch)) {}

  Loader* loader_;
  std::shared_ptr<const LoopToken> epoch_;  // shared with the loader
};

// The loops of one loader, of which only the last may get batches.
class CADRE_EXPORT LoaderLoops {
 public:
  // loader, seek: static texts, the names of the class and of its function that sets the position.
  LoaderLoops(std::string_view loader, std::string_view seek) : loader_(loader), seek_(seek) {}

  // Ends all loops. Returns the token of an epoch.
  std::shared_ptr<const LoopToken> begin_epoch() {
    return epoch_ = loop_ = std::make_shared<const LoopToken>();
  }
  std::shared_ptr<const LoopToken> begin_loop(const std::shared_ptr<const LoopToken>& epoch) {
    if (epoch != epoch_) refuse();
    return loop_ = std::make_shared<const LoopToken>();
  }
  void check(const std::shared_ptr<const LoopToken>& loop) const {
    if (loop != loop_) refuse();
  }

 private:
  [[noreturn]] void refuse() const;

  std::string_view loader_;
  std::string_view seek_;
  std::shared_ptr<const LoopToken> epoch_;  // made by the last begin_epoch()
  std::shared_ptr<const LoopToken> loop_;   // of the only loop that may get batches
};

}  // namespace cadre::data
