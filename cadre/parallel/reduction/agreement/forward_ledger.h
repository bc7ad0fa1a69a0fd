// Records which forwards of a rank a backward has carried, that is, whose gradients it has
// computed. Forwards that no backward has carried show that a rank left out a step, or a part of
// one.
//
// Threads: one; take() inside a backward. Blocking: never. Lifetime: keeps no graph. Errors: none.
// A step is what one synchronized backward reduces: any number of forwards. A forward waits until a
// backward carries it. One that is older than those of a pass and still waits was left behind: by
// an exception in the forward or in the loss, or by a program that skipped its backward. Ranks that
// have different numbers of forwards waiting are not in the same step. Forwards under no_sync() do
// not count for that, because ranks may accumulate as many as they like.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/parallel/reduction/agreement/trailer.h"
#include "cadre/tensor/hooks/autograd_hooks.h"

namespace cadre::reduction {

// The state that the hooks of a forward's outputs share. It is destroyed with their graph.
struct Forward {
  int64_t number = 0;       // is counted from 1
  bool is_reduced = false;  // a backward through it was reduced; a second one is a mistake
  std::vector<wrap::GraphNode> outputs = {};
};

// A forward whose gradients a backward computes.
struct CarriedForward {
  int64_t number;
  int64_t num_samples;              // is 0 if the samples are in the accumulation already
  std::shared_ptr<Forward> passed;  // null unless the backward passes through its outputs
  bool is_certain = true;  // if false, it is assumed, because the backward passes no known forward
};

class ForwardLedger {
 public:
  struct Entering {
    int64_t num_samples;
    bool is_synchronized;  // the forward was not under no_sync()
  };
  std::shared_ptr<Forward> enter(const Entering& entering);
  // Called when the forward has returned, so that its outputs exist.
  void set_returned(int64_t number);
  // Called when a backward has passed through the forward's outputs and computes no gradient of a
  // parameter here, because its `inputs` belong to another model. So the forward was not left
  // behind.
  void set_passed(int64_t number);
  // Called when autograd::grad(create_graph=true) passes through the forward's outputs. The results
  // that it computes until end_derivatives() have a graph that leads to the parameters without
  // these outputs.
  void begin_derivative(int64_t number);
  void end_derivatives();

  // Returns the forwards that the running backward carries, newest first; these wait no longer.
  // `reached`: the forward whose output begins the backward, or null. A backward that passes no
  // known forward carries the newest one that has returned and waits, and may carry others
  // (may_be_carried()); if it only accumulates, it carries the newest one under no_sync().
  struct Backward {
    bool is_accumulated;
  };
  std::vector<CarriedForward> take(const Forward* reached, const Backward& backward);
  // Returns the forwards that have returned and wait, newest first.
  std::vector<CarriedForward> may_be_carried() const;

  // The accumulation (samples of backwards under no_sync()) now has the samples of the forward.
  void set_accumulated(int64_t number);
  void begin_accumulation() { ++accumulation_; }

  int64_t last_number() const { return last_number_; }
  // Returns the position in a pass whose newest forward has this number.
  StepPosition position(int64_t newest) const;
  // Forgives the waiting forwards before `number`, which all ranks have left behind: later steps do
  // not count them again.
  struct Forgiving {
    int64_t step;  // the number of the pass's step
    // The program leaves the same number of forwards behind in each step, so they are not lost.
    bool is_usual;
  };
  void forgive_before(int64_t number, const Forgiving& forgiving);
  // The forgiven forwards that are lost: their graph is destroyed, so that no backward can carry
  // them any more. One with a graph is not lost, because a later backward may carry it. Valid until
  // the next enter(), which drops their entries.
  struct Lost {
    int32_t count = 0;
    int64_t step = 0;  // the step in which the first of them was forgiven
  };
  Lost lost() const;
  // Called when a pass whose newest forward has this number has ended. Places are counted anew.
  void end_pass(int64_t newest);

 private:
  enum class State : uint8_t { kWaiting, kForgiven, kTaken };
  struct Derivative {
    uint64_t first;  // the sequence numbers of its nodes are [first, end)
    uint64_t end;
  };
  struct Entry {
    int64_t number;
    int64_t num_samples;
    bool is_synchronized;
    // The index among the synchronized forwards that were entered, or were waiting, since the last
    // pass.
    int32_t place;
    std::weak_ptr<Forward> forward;
    bool has_returned = false;
    bool is_passed = false;
    int64_t forgiven_in = 0;  // the step in which it was forgiven
    State state = State::kWaiting;
    // The number of the accumulation that has its samples; 0 if there is none.
    int64_t accumulation = 0;
    std::vector<Derivative> derivatives = {};
  };

  Entry* find(int64_t number);
  static bool is_lost(const Entry& entry);
  bool is_of_no_more_use(const Entry& entry) const;
  int64_t uncounted_samples(const Entry& entry) const;

  int64_t last_number_ = 0;
  int64_t accumulation_ = 1;
  int32_t next_place_ = 0;
  std::vector<Entry> entries_;  // the entries, in the order of their numbers
};

}  // namespace cadre::reduction
