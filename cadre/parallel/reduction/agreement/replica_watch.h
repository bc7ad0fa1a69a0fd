// Notices signs that the replicas of a model may have different parameters, and compares the
// parameters in that case.
//
// Ranks whose parameters have drifted apart go on training without an error, each from its own
// values. To compare all values in each step would cost too much, so this class looks for four
// signs, for which it reads the version counter and one element of each parameter:
//   1. A forward has written to a parameter (an Embedding with max_norm, a weight that is
//   normalized in place): each rank may have written different values.
//   2. A parameter was changed while this rank had gradients that were not reduced (an optimizer's
//   step after a backward under no_sync()).
//   3. The ranks have changed their parameters a different number of times since the last
//   reduction. For example, LBFGS computed its loss a different number of times on each rank, or
//   one rank alone loaded a file.
//   4. When the last forwards with grad began, the ranks had different values in one sampled
//   element of a parameter. This finds writes through at::Tensor::data(), which no version counter
//   shows. Each pass samples other elements, so that a difference in few elements is found in some
//   later pass.
// In the next reduction the ranks compare the values of these parameters, bit by bit, and continue
// if they are equal.
//
// Blocking: check() is collective. Lifetime: shares the parameters. Errors: check() throws
// kInvalidArgument, the same on all ranks, in each reduction until the values are equal.
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
  // reports such writes itself (set_written()). check() puts the name and rank of the wrapper in
  // front of the message. `ranks` names the ranks that have written.
  using WrittenError = std::function<Error(const std::string& parameter, const std::string& ranks)>;
  // `written_error` is used only with ParameterValues::kUnwatched.
  ReplicaWatch(std::vector<NamedTensor> parameters, ParameterValues values,
               WrittenError written_error = {});

  // Called when a forward with grad begins. REQUIRES: the parameters have their values, that is,
  // sharded ones were gathered.
  void take_samples();
  // Called before and after each forward, including one without grad.
  void begin_forward();
  void end_forward();
  // Called by a wrapper that reports writes itself (ParameterValues::kUnwatched) when its forward()
  // has written to the parameter `name`. The next check() throws, once.
  void set_written(std::string_view name);
  // Called when a backward under no_sync() has ended, so this rank has gradients that were not
  // reduced.
  void set_has_local_gradients();

  // These functions return the values that this rank reports to the others. suspicion() has one bit
  // for each reason to compare the parameters. num_writes() is the number of changes since the last
  // reduction, by the version counters, modulo 256. samples() is a digest of sampled elements.
  uint32_t suspicion() const;
  uint8_t num_writes() const;
  uint32_t samples() const { return samples_; }

  // Compares the parameters that may differ. Collective. All ranks call it if any rank has a
  // suspicion, or if num_writes() or samples() differ between ranks.
  void check(const Attention& attention, const Wrapper& here, const wrap::LocatedGroup& group);
  // Called when a pass has ended without an error.
  void end_pass();

 private:
  // A state of the parameters, compared with a later one to notice a change.
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
  std::optional<State> local_state_;  // the state at the end of a backward under no_sync()
  bool is_unlike_ = false;            // the last comparison of the ranks' values failed
  uint32_t last_num_writes_ = 0;  // the value of watch_.num_writes() at the end of the last pass
  uint64_t num_passes_ = 0;       // is equal on all ranks
  uint32_t samples_ = 0;
};

}  // namespace cadre::reduction
