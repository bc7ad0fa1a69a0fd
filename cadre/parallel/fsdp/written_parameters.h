// What the program writes to gathered parameters, of all units of one wrapper. The rank that finds
// it does not throw at once: the other ranks would go on to the end of the step, and wait for it
// there.
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
  // Before the first forward. form: in which the wrapper's shards are.
  void attach(const std::shared_ptr<reduction::DataParallelCore>& core, ShardForm form);

  // A forward without grad: no pass follows in which the ranks could learn of it, so its end is an
  // error of this rank. It ends with what was found first in it.
  void begin_evaluation();
  bool is_in_evaluation() const { return is_in_evaluation_; }
  std::optional<Error> end_evaluation() noexcept;

  // This rank has found it. Outside of an evaluation the next pass throws on all ranks.
  void tell(const std::string& parameter, const Error& error);
  // What that pass throws. ranks: those that have written.
  Error pass_error(const std::string& parameter, const std::string& ranks) const;

 private:
  std::weak_ptr<reduction::DataParallelCore> core_;
  ShardForm form_ = ShardForm::kGathered;
  bool is_in_evaluation_ = false;
  std::optional<Error> found_;
};

}  // namespace cadre::parallel
