// Records which forwards of a rank have had a backward. In this file, a backward "carries" the
// forwards whose gradients it computes. Forwards that no backward has carried show that a rank left
// out a step, or a part of one.
//
// Threads: one thread; take() is called inside a backward. Lifetime: keeps no autograd graph.
// A step is what one synchronized backward reduces: any number of forwards. A forward waits until a
// backward carries it. If a forward still waits and is older than the forwards of a pass, it was
// left behind: forward() or the loss threw an exception, or the program skipped the backward. Ranks
// on which different numbers of forwards wait are not in the same step. Forwards under no_sync()
// are not counted here, because each rank may accumulate as many as it likes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/parallel/reduction/agreement/trailer.h"
#include "cadre/tensor/hooks/autograd_hooks.h"

namespace cadre::reduction {

// The state that the autograd hooks of a forward's outputs share. It is destroyed with the graph of
// these outputs.
struct Forward {
  int64_t number = 0;       // the first forward has 1
  bool is_reduced = false;  // its gradients were reduced, so a second backward is an error
  std::vector<wrap::GraphNode> outputs = {};
};

// A forward whose gradients a backward computes (a carried forward).
struct CarriedForward {
  int64_t number;
  int64_t num_samples;              // 0 if the samples were counted under no_sync() already
  std::shared_ptr<Forward> passed;  // null if the backward does not pass through its outputs
  bool is_certain = true;           // false: a guess, because the backward passes no known output
  // The samples were counted under no_sync() already; then num_samples is 0.
  bool is_counted = false;
};

class ForwardLedger {
 public:
  struct Entering {
    int64_t num_samples;
    bool is_synchronized;  // the forward was not under no_sync()
  };
  std::shared_ptr<Forward> enter(const Entering& entering);
  // Called when the forward has returned, so its outputs exist from now on.
  void set_returned(int64_t number);
  // Called when a backward has passed through the forward's outputs but computes no gradient of a
  // parameter of this wrapper, because the `inputs` argument of backward() names tensors of another
  // model. So the forward was not left behind.
  void set_passed(int64_t number);
  // Called when autograd::grad(create_graph=true) passes through the forward's outputs. Tensors
  // that autograd computes between this call and end_derivatives() have a graph that reaches the
  // parameters without passing these outputs.
  void begin_derivative(int64_t number);
  void end_derivatives();

  // Returns the forwards whose gradients the running backward computes ("carries"), newest first,
  // and marks them as no longer waiting for a backward. `reached` is the forward with whose output
  // the backward begins, or null if it passes no known output. If it is null, the newest forward
  // that has returned and still waits is assumed to be carried, and others may be, too
  // (may_be_carried()). In a backward under no_sync() (is_accumulated) the newest forward under
  // no_sync() is assumed.
  struct Backward {
    bool is_accumulated;
  };
  std::vector<CarriedForward> take(const Forward* reached, const Backward& backward);
  // Returns the forwards that have returned and whose gradients no backward has computed, newest
  // first.
  std::vector<CarriedForward> may_be_carried() const;

  // Called when the forward's samples were added to the accumulated ones, that is, to the samples
  // of backwards under no_sync() since the last reduction.
  void set_accumulated(int64_t number);
  void begin_accumulation() { ++accumulation_; }

  int64_t last_number() const { return last_number_; }
  // Returns how many forwards older and newer than the forward `newest` still wait for a backward.
  // `newest` is the newest forward of a pass (one reduction of all gradients).
  StepPosition position(int64_t newest) const;
  // Marks the forwards before `number` that still wait for a backward as forgiven: all ranks have
  // left the same number of them behind, so later steps do not count them again.
  struct Forgiving {
    int64_t step;  // the number of the step that the pass reduces
    // True if the program leaves the same number of forwards behind in each step, as one that
    // trains two models alternately does. Then these forwards are not reported as lost.
    bool is_usual;
  };
  void forgive_before(int64_t number, const Forgiving& forgiving);
  // Returns the forgiven forwards that are lost: their graph is destroyed, so no backward can
  // compute their gradients any more. A forward whose graph exists is not lost. The result is valid
  // until the next enter(), which removes their entries.
  struct Lost {
    int32_t count = 0;
    int64_t step = 0;  // the step in which the first of them was forgiven
  };
  Lost lost() const;
  // Called when a pass (one reduction of all gradients) has ended. `newest` is the number of its
  // newest forward. The places of later forwards count from 0 again.
  void end_pass(int64_t newest);

 private:
  enum class State : uint8_t { kWaiting, kForgiven, kTaken };
  struct Derivative {
    uint64_t first;  // autograd gave its nodes the sequence numbers [first, end)
    uint64_t end;
  };
  struct Entry {
    int64_t number;
    int64_t num_samples;
    bool is_synchronized;
    // The index of this forward among the synchronized forwards that began after the last pass, or
    // still waited for a backward when it ended.
    int32_t place;
    std::weak_ptr<Forward> forward;
    bool has_returned = false;
    bool is_passed = false;
    int64_t forgiven_in = 0;  // the number of the step in which it was forgiven
    State state = State::kWaiting;
    // The number of the accumulation (the backwards under no_sync() between two reductions) that
    // counts the samples of this forward; 0 if none does.
    int64_t accumulation = 0;
    std::vector<Derivative> derivatives = {};
  };

  Entry* find(int64_t number);
  static bool is_lost(const Entry& entry);
  bool is_of_no_more_use(const Entry& entry) const;
  CarriedForward carried(const Entry& entry) const;

  int64_t last_number_ = 0;
  int64_t accumulation_ = 1;
  int32_t next_place_ = 0;
  std::vector<Entry> entries_;  // the entries, in the order of their numbers
};

}  // namespace cadre::reduction
