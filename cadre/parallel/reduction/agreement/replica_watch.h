// Notices that the replicas of a model may have different parameters, and compares them then.
//
// Ranks whose parameters have drifted apart go on training without an error, each from its own
// values. To compare all values in each step would cost too much, so this looks for signs, which
// cost a look at the version counter and at one element of each parameter:
//   a forward has written to a parameter (an Embedding with max_norm, a weight that is normalized
//   in place): each rank may have written other values;
//   a parameter was changed while this rank had gradients that were not reduced (an optimizer's
//   step after a backward under no_sync());
//   the ranks have changed their parameters a different number of times since the last reduction
//   (an optimizer that computes its loss a different number of times on each rank, as LBFGS; a file
//   that one rank alone loads);
//   the ranks' last forwards with grad began with other values of one element of some parameter (a
//   write through at::Tensor::data(), which no version counter shows). Each pass looks at other
//   elements, so that a difference of few elements is found in some later pass.
// At the next reduction the ranks compare the values of the parameters in question, bit by bit, and
// go on if these are equal.
//
// Threads: one. Blocking: check() is collective. Lifetime: shares the parameters. Errors:
// kInvalidArgument from check(), the same on all ranks, in each reduction until the values are
// equal.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/parallel/reduction/agreement/attention.h"
#include "cadre/parallel/reduction/agreement/wrapper.h"
#include "cadre/tensor/hooks/located_group.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/hooks/parameter_watch.h"

namespace cadre::reduction {

class ReplicaWatch {
 public:
  // Makes the error that check() throws if a forward has written to a parameter of a wrapper that
  // watches its parameters itself; check() puts the wrapper's place in front. ranks: the ranks that
  // have written.
  using WrittenError = std::function<Error(const std::string& parameter, const std::string& ranks)>;
  // `written_error` is used only with ParameterValues::kUnwatched.
  ReplicaWatch(std::vector<NamedTensor> parameters, ParameterValues values,
               WrittenError written_error = {});

  // Called when a forward with grad begins. REQUIRES: the parameters have their values.
  void take_samples();
  // Called around each forward, also one without grad.
  void begin_forward();
  void end_forward();
  // A wrapper that watches its parameters itself has found that forward() has written to the
  // parameter of this name. The next check() throws, once.
  void set_written(std::string_view name);
  // Called when a backward of this rank alone has ended.
  void set_has_local_gradients();

  // These functions return the values that this rank reports to the others. suspicion(): reasons to
  // compare, a bit for each. num_writes(): the number of changes since the last reduction that a
  // version counter shows, modulo 256. samples(): a digest of samples of the values.
  uint32_t suspicion() const;
  uint8_t num_writes() const;
  uint32_t samples() const { return samples_; }

  // Compares the parameters that may differ. Collective; called if any rank has a suspicion, or the
  // numbers of changes or the samples differ.
  void check(const Attention& attention, const Wrapper& here, const wrap::LocatedGroup& group);
  // Called when a pass has ended without an error.
  void end_pass();

 private:
  // The values that are compared to notice a change of the parameters.
  struct State {
    uint32_t num_writes = 0;
    uint64_t samples = 0;

    bool operator==(const State&) const = default;
  };
  State state() const;
  bool has_stepped_alone() const { return local_state_ && *local_state_ != state(); }
  bool is_sharded(size_t parameter) const;
  // Returns the parameters to which a forward of some rank has written. Collective.
  std::vector<size_t> written_by_some(const wrap::LocatedGroup& group) const;
  [[noreturn]] void refuse_written(size_t parameter, const std::string& ranks, const Wrapper& here);

  ParameterValues values_;
  WrittenError written_error_;
  wrap::WriteWatch watch_;
  bool is_in_forward_ = false;
  std::vector<bool> is_written_;  // says for each parameter whether a forward has written to it
  bool has_lone_step_ = false;
  std::optional<State> local_state_;  // the state at the end of a backward of this rank alone
  bool is_unlike_ = false;            // the last comparison has found different values
  uint32_t last_num_writes_ = 0;  // the value of watch_.num_writes() at the end of the last pass
  uint64_t num_passes_ = 0;       // is equal on all ranks
  uint32_t samples_ = 0;
};

}  // namespace cadre::reduction
