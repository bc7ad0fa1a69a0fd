// Decides when the parameters of each unit are gathered and freed. Forwards, backwards and
// summon_full_params() of a sharded model call this state machine.
//
// Threads: one, which also runs forward and backward. Blocking: the methods that gather, until the
// group's deadline. Lifetime: owns the units' memory. Errors: cadre::Error: those of the gathers,
// and kInvalidArgument for a call at a point where it is not allowed.
//
//   sharded --gather--> in flight --wait--> full --release--> sharded
//
// Unit 0 is the root. It has the parameters that are in no other unit.
//
// Forward: a unit is gathered before its use, and the next unit in the order of the last forward is
// prefetched. After its use the unit is released if its Reshard says so.
//
// Uses by operations: begin_use() says that an operation needs a unit's parameters. In a forward
// the unit is then gathered, and the units that earlier operations have used are released as after
// their forward, except for those around the unit and those of the same operation. So a module that
// is no ShardUnit can be a unit.
//
// Outside of a forward and a backward, an operation may read parameters, too. The uses up to the
// next forward or backward are a pass of their own (UnitOrder::Pass::kOutside), in which a unit is
// gathered again if its shards have changed.
//
// Backward: a unit is gathered again when an operation needs it, or when the backward reaches its
// outputs. The units are prefetched in the order of the last backward, and in the first backward in
// the reverse order of the forward. A unit is released when two conditions hold. First, the
// gradients of all its trained parameters have been computed. Second, for every call of the unit
// whose outputs the backward has reached, the backward has also reached the inputs, because a node
// between them may need a frozen parameter. If the second condition cannot be determined, the unit
// is released at the end of the backward.
//
// Exceptions: if a backward throws on one rank, that rank continues to take part in the gathers
// that the other ranks still make in this backward, in the order of the last backward. So the other
// ranks can complete their backward and then get an error. Until then the rank keeps its part of
// each unit with Reshard::kOntoGroup, because the other ranks gather from it.
//
// After a backward that reduces gradients, the optimizer may change the parameters at any time. So
// from then on units are gathered again at each use, also those that are still full, until a
// backward only accumulates gradients.
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

// The parameters of one unit, which this interface gathers and frees.
class UnitMemory {
 public:
  virtual ~UnitMemory() = default;
  // Returns whether the parameters are gathered, or are being gathered.
  virtual bool is_full() const = 0;
  // Starts to gather the shards of all ranks. Collective.
  virtual void gather() = 0;
  // Waits for the gather. Afterwards the parameters may be read. Errors contain the unit's name.
  virtual void wait_full() = 0;
  // Waits for a gather that is in flight, and frees the memory.
  virtual void release() = 0;
  // Frees the memory except for this rank's part in its reshard group. The next gather is then
  // within that group, unless mark_stale() or release() is called before.
  virtual void release_onto_group() = 0;
  // Called when ranks change their shards, so that gathered values are no longer valid.
  virtual void mark_stale() = 0;
  // Returns whether this rank's shard has changed since the parameters were gathered, or since a
  // gather in flight began.
  virtual bool is_outdated() const = 0;
};

// Calls `call` for every element, even if some of the calls throw. Then throws the first exception
// again.
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
    size_t parent = 0;  // the index of the innermost unit around this one
    Reshard reshard = Reshard::kAfterForward;
    // The indices of the unit's trained parameters, which are the arguments of gradient_arrived().
    std::vector<size_t> parameters = {};
    bool has_frozen = false;
  };
  // Describes a use of parameters, which must be equal on all ranks.
  struct Use {
    UnitOrder::Pass pass;
    size_t unit;
    uint64_t num_updates = 0;
  };
  struct Options {
    int num_prefetched = 1;
    // Compares the uses of all ranks, and throws on all ranks if they differ. Collective.
    std::function<void(const Use& use)> compare = [](const Use&) {};
    // Returns whether shards have reduced gradients, so that an optimizer step may still follow.
    // The result is the same on all ranks.
    std::function<bool()> has_gradients = [] { return false; };
    // Returns the number of updates of the shards so far. If one rank skips an update, or makes one
    // alone, the ranks' numbers differ, and the next comparison reports it.
    std::function<uint64_t()> num_updates = [] { return uint64_t{0}; };
    std::string rank = "rank 0";  // errors begin with this text
  };
  // units[0] is the root.
  UnitSchedule(std::vector<Unit> units, Options options);
  ~UnitSchedule();
  UnitSchedule(const UnitSchedule&) = delete;
  UnitSchedule& operator=(const UnitSchedule&) = delete;

  // Begin and end the root module's forward.
  void begin_forward(bool with_grad);
  void end_forward();
  // Called before and after a unit's forward, which runs in the root's forward or in a backward
  // that recomputes activations.
  void before_forward(size_t unit);
  void after_forward(size_t unit);
  // Called instead of after_forward() if the unit's forward has thrown. The root's forward may
  // catch the exception and continue.
  void fail_forward(size_t unit) noexcept;
  // Called if the root's forward or a backward has thrown.
  void abandon() noexcept;

  // Begin and end an operation that is given parameters of the unit. An operation that is given
  // parameters of several units begins a use of each. In a backward, begin_backward() is called
  // before.
  void begin_use(size_t unit);
  void end_use(size_t unit) noexcept { --states_[unit].num_running; }
  // Throws kInvalidArgument, with the unit's name, for an operation that writes to parameters
  // outside of a pass: the change would be lost, because only shards are kept.
  [[noreturn]] void refuse_write(size_t unit) const;

  // Begins a backward, if none runs. The caller must ensure that end_backward() or abandon()
  // follows.
  void begin_backward();
  // One call of a unit's forward, whose graph a backward goes through.
  struct Call {
    size_t unit;
    // The autograd nodes that computed the inputs of the call, for inputs that require grad.
    std::vector<wrap::GraphNode> inputs = {};
    // True if the backward has reached the outputs, but not yet the inputs of the call.
    bool is_open = false;
  };
  void reached_output(const std::shared_ptr<Call>& call, const wrap::GraphNode& node);
  // Called when the backward has computed the gradient of an input of the call. Autograd has then
  // run all nodes of the call, because it runs nodes with higher sequence numbers first, and the
  // nodes of the call were made after the node that computed the input.
  void passed_input(Call& call);
  void gradient_arrived(size_t parameter);
  struct End {
    bool is_reduced;     // gradients were reduced, so an optimizer step may follow
    bool creates_graph;  // create_graph: the new graph needs the parameters
  };
  void end_backward(const End& end);
  // begin_reduction() is called when a reduction of the gradients begins, usually in a backward,
  // and count_launch() when the reduction of a bucket is launched.
  void begin_reduction();
  void count_launch() { ++num_launched_; }
  // Called on a rank on which a reducing backward has thrown. Starts the gathers that the other
  // ranks make before they reduce bucket `launch`, so that these complete. Does nothing if these
  // gathers cannot be predicted: in the first backward, or if the units were used in another order.
  void follow_others(size_t launch);
  // Called when gradients were reduced outside of a backward. An optimizer step may then follow.
  void end_reduction();
  // Called on all ranks when the program has cleared gradients that were accumulated without
  // reduction. An optimizer step may then change the parameters even without gradients, for example
  // by its momentum.
  void expect_changes() {
    may_change_ = true;
    is_current_ = false;
  }

  // Called when an operation writes to this rank's shards, as each update does on all ranks, also
  // on those that own no elements. A use outside of a pass then gathers again, and until then
  // the memory of units that are still full cannot be accessed.
  void expect_other_values() noexcept;

  // summon() gathers all units, and dismiss() frees them. Between the two calls neither forward nor
  // backward is allowed.
  void summon();
  void dismiss();

  bool is_in_backward() const { return phase_ == Phase::kBackward; }
  bool is_idle() const { return phase_ == Phase::kIdle; }
  // Returns whether neither a forward nor a backward runs and the parameters are not summoned.
  bool is_outside() const { return phase_ == Phase::kIdle || phase_ == Phase::kOutside; }
  // Returns whether the current backward has computed a gradient.
  bool has_accumulated() const { return has_accumulated_; }
  size_t num_units() const { return units_.size(); }
  const std::string& name(size_t unit) const { return units_[unit].name; }

 private:
  enum class Phase : uint8_t { kIdle, kForward, kBackward, kOutside, kSummoned };
  struct State {
    // The number of trained parameters whose gradients this backward has not computed yet.
    size_t num_missing = 0;
    int num_open = 0;          // calls with is_open
    bool had_inputs = false;   // this backward has reached a call with inputs that require grad
    bool was_reached = false;  // this backward has reached an output, or used a parameter
    bool is_used = false;      // an operation of this pass has used the unit since its last release
    int num_running = 0;       // operations that use the unit now
  };

  // A gather of a unit in a backward, and how many buckets had been launched before it.
  struct Gather {
    size_t unit;
    size_t num_launched;

    friend bool operator==(const Gather&, const Gather&) = default;
  };

  void begin_pass(UnitOrder::Pass pass);
  bool has_current_values() const { return is_current_ && num_updates_ == options_.num_updates(); }
  void begin_outside();
  void end_outside();
  void mark_changed_stale();
  // Releases the units that earlier operations have used and that `unit` does not need.
  void leave_others(size_t unit);
  bool is_around(size_t outer, size_t unit) const;
  // Returns whether `other` stays full in a backward when an operation begins to use `unit`.
  bool is_kept_in_backward(size_t other, size_t unit) const;
  void gather(size_t unit);
  bool knows_what_follows() const;
  void compare(const Use& use);
  void use(size_t unit);
  void prefetch();
  void release_if_done(size_t unit);
  // Releases the unit, releases it onto its group or keeps it, as its Reshard says.
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
  // Whether the program may change the shards before the next forward, by an optimizer step or by
  // loading values, so that units must be gathered again. It is false between backwards that only
  // accumulate gradients: then units are gathered again only if is_outdated() notices a change, or
  // after expect_changes().
  bool may_change_ = true;
  // Whether nothing has changed the shards since the last forward, or the last sequence of uses
  // outside of a pass, began. A use outside then finds current values in units that are still full.
  bool is_current_ = false;
  uint64_t num_updates_ = 0;  // Options::num_updates() at the start of the last pass
  bool awaits_step_ = false;  // gradients were reduced, and an optimizer step may follow
  bool has_accumulated_ = false;
  // True if no unit is released, because the last backward had create_graph and its new graph needs
  // the parameters.
  bool keeps_all_ = false;
  std::vector<std::weak_ptr<Call>> open_calls_;
  size_t num_launched_ = 0;
  bool has_backward_ = false;         // the reduction is in a backward
  bool is_compared_ = false;          // the current backward has left the predicted order
  std::vector<Gather> gathers_;       // the gathers of the current backward, also after abandon()
  std::vector<Gather> last_gathers_;  // those of the last backward that reduced and completed
  std::optional<size_t> followed_;    // the last unit that follow_others() has gathered
};

}  // namespace cadre::parallel
