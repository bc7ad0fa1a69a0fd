// Records, for all units of one wrapper, that the program has written to gathered parameters, which
// is an error. The rank that finds such a write does not throw at once, because the other ranks
// would wait for it in their next collective.
//
// Threads: as the wrapper. Lifetime: shared by the FlatParameters, which may outlive the wrapper.
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
  // Must be called before the first forward. form: the form of the wrapper's shards.
  void attach(const std::shared_ptr<reduction::DataParallelCore>& core, ShardForm form);

  // Called at the beginning and at the end of a forward without grad. If the program wrote to
  // gathered parameters in this forward, end_evaluation() returns the first such error. Only this
  // rank throws the error, because no backward follows that could report it to the other ranks.
  void begin_evaluation();
  bool is_in_evaluation() const { return is_in_evaluation_; }
  std::optional<Error> end_evaluation() noexcept;

  // Called when this rank has found that the program wrote to `parameter`. In a forward without
  // grad, stores the error for end_evaluation(); otherwise makes the next reduction of gradients
  // throw on all ranks.
  void tell(const std::string& parameter, const Error& error);
  // Returns the error that the reduction of gradients throws. ranks: text with the ranks that have
  // written.
  Error pass_error(const std::string& parameter, const std::string& ranks) const;

 private:
  std::weak_ptr<reduction::DataParallelCore> core_;
  ShardForm form_ = ShardForm::kGathered;
  bool is_in_evaluation_ = false;
  std::optional<Error> found_;
};

}  // namespace cadre::parallel
