// Decides when the parameters of each unit are gathered and released. Every use of a sharded model
// goes through this state machine.
//
// Threads: forward, backward and every method from one thread. Blocking: the methods that gather,
// until the group's deadline. Lifetime: owns the units' memory. Errors: cadre::Error: those of the
// gathers, and kInvalidArgument for a call at a point where it is not allowed.
//
//   sharded --gather--> on its way --wait--> full --release--> sharded
//
// Unit 0 is the root. It has the parameters that no other unit holds.
//
// Forward: a unit is gathered before its first use, while the next unit in the order of the last
// pass is prefetched. After its use it is released, if its Reshard says so.
//
// Backward: a unit is gathered again when the backward reaches its outputs. The units are
// prefetched in the order of the last backward, and in the first backward in the reverse order of
// the forward. A unit is released when two conditions hold. The gradients of all its trained
// parameters have arrived. And for every call of the unit whose outputs the backward has passed, it
// has also passed the inputs, because a node between them may need a frozen parameter. Units for
// which the second condition cannot be determined are released at the end of the backward.
//
// Exceptions: a rank that leaves a backward by an exception continues to gather the units that the
// other ranks still gather in this pass, in the order of the last backward. So the other ranks can
// end their pass and learn of the exception. Until then the rank keeps its part of each unit that
// was released onto its group, because the other ranks gather from it.
//
// After a backward that reduces gradients a step of the optimizer follows, which changes the
// parameters. So units that are still full are gathered again at their next use. The same holds for
// every later use, until a backward that only accumulates gradients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/fsdp/unit_order.h"
#include "cadre/tensor/hooks/autograd_hooks.h"

namespace cadre::parallel {

// The full parameters of one unit.
class UnitMemory {
 public:
  virtual ~UnitMemory() = default;
  // Returns whether the parameters are gathered, or are being gathered.
  virtual bool is_full() const = 0;
  // Starts to gather from the owners; collective.
  virtual void gather() = 0;
  // Waits for the gather; the parameters may be read afterwards.
  virtual void wait_full() = 0;  // errors name the unit
  // Ends a gather that still runs, and frees the memory.
  virtual void release() = 0;
  // Frees the memory except for a part, with which the next gather costs less, until mark_stale()
  // or release().
  virtual void release_onto_group() = 0;
  // Called when the owners change their shards: values that were gathered before are no longer
  // valid.
  virtual void mark_stale() = 0;
  // Returns whether the parameters are gathered, or are being gathered, with values that this
  // rank's shard no longer has.
  virtual bool is_outdated() const = 0;
};

// Calls `call` for every element, also after one of the calls has thrown; then throws the first
// exception.
template <typename Range, typename Call>
void for_all(const Range& elements, const Call& call) {
  std::exception_ptr first;
  for (const auto& element : elements) {
    try {
      call(element);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

class UnitSchedule {
 public:
  struct Unit {
    std::string name;  // the name of the module; "" for the root
    std::unique_ptr<UnitMemory> memory;
    Reshard reshard = Reshard::kAfterForward;
    // The trained parameters, as gradient_arrived() numbers them.
    std::vector<size_t> parameters = {};
    bool has_frozen = false;
  };
  // Describes the next use of parameters, which is equal on all ranks.
  struct Use {
    UnitOrder::Pass pass;
    size_t unit;
    uint64_t num_updates = 0;
  };
  struct Options {
    int num_prefetched = 1;
    // Compares the use with those of the other ranks, and throws on all ranks if they differ.
    std::function<void(const Use& use)> compare = [](const Use&) {};
    // Returns whether shards have reduced gradients, which a step of the optimizer may still use.
    // The result is the same on all ranks.
    std::function<bool()> has_gradients = [] { return false; };
    // Returns the number of updates of the shards so far, the same on all ranks. A rank that skips
    // an update, or makes one alone, differs from the others in the order of its passes.
    std::function<uint64_t()> num_updates = [] { return uint64_t{0}; };
    std::string rank = "rank 0";  // messages begin with it
  };
  // units[0] is the root.
  UnitSchedule(std::vector<Unit> units, Options options);
  ~UnitSchedule();
  UnitSchedule(const UnitSchedule&) = delete;
  UnitSchedule& operator=(const UnitSchedule&) = delete;

  // Begin and end the root module's forward.
  void begin_forward(bool with_grad);
  void end_forward();
  // Called for a unit's forward, in the root's forward or in a backward that recomputes the
  // forward.
  void before_forward(size_t unit);
  void after_forward(size_t unit);
  // Called when the unit's forward ended by an exception, which the root's forward may catch.
  void fail_forward(size_t unit) noexcept;
  // Called when the root's forward or a backward ended by an exception.
  void abandon() noexcept;

  // The first event begins the pass; the caller ensures that end_backward() or abandon() follows.
  void begin_backward();
  // A call of a unit that a backward passes.
  struct Call {
    size_t unit;
    // Has for each input of the call that has a gradient the node that made it.
    std::vector<wrap::GraphNode> inputs = {};
    bool is_open = false;  // the running backward is between the outputs and the inputs of the call
  };
  void reached_output(const std::shared_ptr<Call>& call, const wrap::GraphNode& node);
  // Called when the backward has computed the gradient of an input of the call. By then it has run
  // all nodes of the call: they are younger than the node that made the input, and autograd runs
  // the youngest first.
  void passed_input(Call& call);
  void gradient_arrived(size_t parameter);
  struct End {
    bool is_reduced;     // gradients were reduced, so a step of the optimizer follows
    bool creates_graph;  // the new graph's nodes need the parameters
  };
  void end_backward(const End& end);
  // Called when a reduction begins, mostly in a backward; count_launch() counts each bucket that is
  // reduced.
  void begin_reduction();
  void count_launch() { ++num_launched_; }
  // Called on a rank that has left the reducing backward by an exception: starts the gathers that
  // the others make before they reduce bucket `launch`. Does nothing if these gathers are not
  // known: in the first backward, and if the units were used in another order.
  void follow_others(size_t launch);
  // Called when gradients were reduced outside of a backward: a step of the optimizer follows.
  void end_reduction();
  // Called when the program has cleared gradients that were accumulated without reduction. A step
  // of the optimizer may follow that changes the parameters without new gradients, for example by
  // its momentum. All ranks make this call.
  void expect_changes() { may_change_ = true; }

  // All units are full from summon() to dismiss(), and no forward or backward is allowed meanwhile.
  void summon();
  void dismiss();

  bool is_in_backward() const { return phase_ == Phase::kBackward; }
  // Returns whether a gradient has arrived in the running backward.
  bool has_accumulated() const { return has_accumulated_; }
  size_t num_units() const { return units_.size(); }
  const std::string& name(size_t unit) const { return units_[unit].name; }

 private:
  enum class Phase : uint8_t { kIdle, kForward, kBackward, kSummoned };
  struct State {
    // The number of trained parameters whose gradient has not arrived in this backward.
    size_t num_missing = 0;
    int num_open = 0;          // the number of calls that are open
    bool had_inputs = false;   // this backward has reached a call whose inputs have gradients
    bool was_reached = false;  // this backward has reached an output
  };

  // A gather that was started in a backward.
  struct Gather {
    size_t unit;
    size_t num_launched;

    friend bool operator==(const Gather&, const Gather&) = default;
  };

  void begin_pass(UnitOrder::Pass pass);
  void gather(size_t unit);
  bool knows_what_follows() const;
  void compare(const Use& use);
  void use(size_t unit);
  void prefetch();
  void release_if_done(size_t unit);
  // Releases the unit as its Reshard says.
  void release_after_forward(const Unit& unit);
  void close_calls();
  void release_all(bool (*is_released)(Reshard));
  void release_after_failure(size_t unit) noexcept;
  [[noreturn]] void refuse(const std::string& what, const std::string& remedy) const;

  std::vector<Unit> units_;
  std::vector<State> states_;
  std::vector<size_t> unit_of_parameter_;
  Options options_;
  UnitOrder order_;
  Phase phase_ = Phase::kIdle;
  bool is_with_grad_ = false;
  // If true, the program may change the shards before the next forward, by a step or by loading
  // values. Between backwards without reduction it is expected to leave them unchanged; then the
  // units are gathered again only after a change that is_outdated() notices, or if accumulated
  // gradients are cleared.
  bool may_change_ = true;
  uint64_t num_updates_ = 0;  // the number of updates at the start of the last pass
  bool awaits_step_ = false;  // reduced gradients still wait for a step
  bool has_accumulated_ = false;
  // Nothing is released, because the graph of a derivative needs the parameters.
  bool keeps_all_ = false;
  std::vector<std::weak_ptr<Call>> open_calls_;
  size_t num_launched_ = 0;
  bool has_backward_ = false;         // a backward has begun since the reduction began
  bool is_compared_ = false;          // the running backward has left the expected order
  std::vector<Gather> gathers_;       // the gathers of the running backward, or of an abandoned one
  std::vector<Gather> last_gathers_;  // the gathers of the last backward that has reduced and ended
  std::optional<size_t> followed_;    // the last unit that follow_others() has started
};

}  // namespace cadre::parallel
