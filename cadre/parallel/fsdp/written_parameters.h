// Records that the program has written to gathered parameters, for all units of one wrapper. The
// rank that finds such a write does not throw at once: the other ranks would go on to the end of
// the step, and wait for it there.
//
// Threads: as the wrapper. Blocking: never. Lifetime: shared by the flat parameters, which may
// outlive the wrapper. Errors: none; it holds them.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/parallel/shard/data_strategy.h"

namespace cadre::reduction {
class DataParallelCore;
}

namespace cadre::parallel {

class WrittenParameters {
 public:
  // Called before the first forward. form: the form of the wrapper's shards.
  void attach(const std::shared_ptr<reduction::DataParallelCore>& core, ShardForm form);

  // Begin and end a forward without grad. No pass follows in which the other ranks could learn of a
  // write, so end_evaluation() returns the first error found in the forward, for this rank only.
  void begin_evaluation();
  bool is_in_evaluation() const { return is_in_evaluation_; }
  std::optional<Error> end_evaluation() noexcept;

  // Called when this rank has found a write. Outside of an evaluation the next pass throws on all
  // ranks.
  void tell(const std::string& parameter, const Error& error);
  // Returns the error that this pass throws. ranks: those that have written.
  Error pass_error(const std::string& parameter, const std::string& ranks) const;

 private:
  std::weak_ptr<reduction::DataParallelCore> core_;
  ShardForm form_ = ShardForm::kGathered;
  bool is_in_evaluation_ = false;
  std::optional<Error> found_;
};

}  // namespace cadre::parallel
