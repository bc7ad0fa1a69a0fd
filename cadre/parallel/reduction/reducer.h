// Averages gradients over replicas while a backward computes them. The Reducer decides when a
// gradient is reduced and with which weight; the GradientStorage decides in which memory it is
// kept.
//
// Threads: one backward at a time; forward, backward and every method from one thread.
// Blocking: a backward that synchronizes waits at its end, until the group's deadline. reduce_now()
// is collective, and so is the end of the first backward, for more than the reduction.
// Lifetime: the destructor removes the hooks; gradients stay.
// Errors: cadre::Error, thrown out of backward().
//
// One pass, from the first event of a backward to its end:
//   begin    the first hook of an output of the wrapped forward (or of a parameter) queues the end,
//            and lists the forwards that the pass carries: all whose outputs are in its graph.
//   ready    each parameter's hook gives the gradient to the storage; a bucket whose gradients are
//            all ready is reduced in the background, and buckets only in their order, so all ranks
//            issue the same operations.
//   finish   runs as the engine's last callback: parameters that were not reached are unused on
//            this rank and contribute zeros; the remaining buckets but the last are reduced; after
//            all of these have completed, the last bucket is reduced.
// Ranks may differ in which parameters are unused or frozen and which forwards a pass carries, and
// a rank may leave a pass by an exception. Each rank writes this state into the trailer, which is
// reduced with the last bucket (agreement/trailer.h). If a rank reports such a state, or the ranks
// differ, all ranks reduce one vector of counts (agreement/attention.h) and end the pass in the
// same way. The first time that a parameter is unused, rank 0 logs its name and the ranks on which
// it is unused. After the first pass the storage receives the order in which gradients became ready
// on rank 0. Source: c10d's Reducer; docs/decisions/0003 lists what differs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/parallel/buckets/bucket_layout.h"
#include "cadre/parallel/buckets/gradient_storage.h"
#include "cadre/parallel/reduction/agreement/attention.h"
#include "cadre/parallel/reduction/agreement/forward_ledger.h"
#include "cadre/parallel/reduction/agreement/gradient_weighting.h"
#include "cadre/parallel/reduction/agreement/local_gradients.h"
#include "cadre/parallel/reduction/agreement/replica_watch.h"
#include "cadre/parallel/reduction/agreement/sample_weight.h"
#include "cadre/parallel/reduction/agreement/trailer.h"
#include "cadre/tensor/group/backward/backward_weight.h"
#include "cadre/tensor/hooks/autograd_hooks.h"
#include "cadre/tensor/hooks/located_group.h"

namespace cadre::reduction {

class Reducer {
 public:
  // Reduces the gradients of the storage's parameters, which are the same on all ranks of the
  // group. `replicas` checks whether the parameters are equal on all ranks, and must outlive this
  // object.
  Reducer(std::unique_ptr<GradientStorage> storage, wrap::LocatedGroup group, Wrapper wrapper,
          GradientWeighting weighting, ReplicaWatch& replicas);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Called before each forward with grad. In a pass this rank is weighted by the samples of the
  // forwards whose outputs the backward reaches, plus the samples of the backwards under no_sync()
  // since the last pass.
  void begin_forward(int64_t num_samples);
  // Called after that forward, with the tensors that it returned.
  void watch(std::span<const at::Tensor> outputs);
  // Called when a forward on this rank received the buffers of another wrapper: then the next pass
  // throws on all ranks.
  void set_got_other_buffers() { got_other_buffers_ = true; }
  // If sync is off (no_sync()), gradients accumulate on this rank and are not reduced.
  void set_sync(bool on) { sync_ = on; }
  // See NoSyncOptions.
  void set_losses_are_weighted(bool on) { losses_are_weighted_ = on; }
  // Reduces gradients outside of a backward: those accumulated under no_sync(), and those that the
  // program has assigned or changed since the last reduction.
  void reduce_now();
  // See GradientStorage::zero_grad().
  void zero_grad(bool set_to_none) { storage_->zero_grad(set_to_none); }
  std::optional<BucketLayout> learned_layout() const;
  // If autograd no longer calls the hook of some parameter, returns a clause that says why for the
  // first such parameter; else nullopt.
  std::optional<std::string> lost_parameter() const;

 private:
  struct Pass {
    bool is_active = false;
    bool is_backward = false;                      // false in reduce_now()
    std::vector<std::shared_ptr<Forward>> passed;  // the forwards whose outputs are in the graph
    int backward = 0;                              // the number of the backward in this process
    int64_t newest_forward = 0;                    // the number of the newest forward of this pass
    std::vector<int64_t> samples;  // the sample count of each forward; one weight must fit all
    int64_t num_samples = 0;       // the samples by which this rank is weighted
    // The differentiable collectives that backwards under no_sync() have run: the ranks of each
    // group in which one ran.
    std::vector<std::vector<int>> collectives;
    SampleWeight weight;  // the weight of this rank
    // Tells nodes of the graph by which this rank's gradients will be weighted, if the ranks are
    // weighted by their samples.
    std::optional<BackwardWeight> announced;
    std::vector<bool> fired;        // says for each parameter whether its hook has run
    std::vector<bool> placed;       // says for each parameter whether the storage has its gradient
    std::vector<int64_t> arrivals;  // the parameters in the order of their hooks
    std::vector<int64_t> num_missing;  // the number of gradients of each bucket that are not ready
  };

  void on_output(const std::shared_ptr<Forward>& forward);
  void on_derivative(const std::shared_ptr<Forward>& forward);
  void on_gradient(size_t parameter);
  void begin_pass(std::vector<CarriedForward> carried);
  // `reached` is the forward with whose output the backward begins. It is null if the backward
  // reaches a parameter's gradient first; that parameter is `just_touched`.
  void begin_backward(const Forward* reached, std::optional<size_t> just_touched);
  void join_late(const std::shared_ptr<Forward>& forward);
  void place_gradient(size_t parameter);
  void launch_complete_buckets();
  void finish_pass();
  void launch_all_but_last();
  // Returns whether the pass reduces the parameter's gradient although the backward has not reached
  // the parameter.
  bool contributes(size_t parameter) const;
  bool is_frozen(size_t parameter) const;
  Attention attention(bool gave_up) const;
  void settle(const Attention& attention);
  void settle_last_pass();
  // Throws if the ranks are in different steps. After that, every later pass throws, too.
  void check_ranks_are_in_one_step(const Attention& attention);
  // Returns whether this rank logs what is the same on all ranks: rank 0 of the group and, if
  // tensor parallelism has divided the module, only that of the group with the first parts.
  bool logs_for_all_ranks() const;
  void forgive_left_behind(int64_t newest_forward);
  void log_left_behind_once();
  // Returns the differentiable collectives that ran in the backwards of this pass, each as the list
  // of its ranks in this group. Only groups that share several ranks with this one are listed,
  // because only then can the ranks have unequal weights. Empty if all weights are equal.
  std::vector<std::vector<int>> exchanged() const;
  // The number of the wrapper that the ranks compare, with the bit kGotOtherBuffers if it is set.
  uint32_t wrapper_number() const;
  TrailerWord trailer_word(bool has_news) const;
  void check_frozen_on_all_or_none(const Attention& attention);
  void log_unused_once(const Attention& attention);
  void log_unlike_parts_once(std::span<const CarriedForward> carried);
  void abandon_pass() noexcept;
  void learn_layout();

  std::unique_ptr<GradientStorage> storage_;
  std::vector<at::Tensor> parameters_;  // the parameters of the storage
  std::vector<std::string> names_;
  wrap::LocatedGroup group_;
  // Hooks of outputs share this pointer, because they may outlive this object and then name the
  // wrapper in an error.
  std::shared_ptr<const Wrapper> wrapper_;
  bool got_other_buffers_ = false;
  GradientWeighting weighting_;
  bool unused_are_logged_ = false;
  bool left_behind_are_logged_ = false;
  bool unlike_parts_are_logged_ = false;
  bool losses_are_weighted_ = false;
  // The number of forwards that had no backward before the first pass. A program that trains two
  // models alternately leaves the same number in each step.
  std::optional<int32_t> usual_left_behind_;
  bool sync_ = true;
  ForwardLedger ledger_;
  std::shared_ptr<Forward> forward_;  // set between begin_forward() and watch()
  int64_t num_steps_ = 0;  // the number of passes, plus forwards that all ranks left behind
  int num_unreduced_forwards_ = 0;
  ReplicaWatch& replicas_;
  LocalGradients local_;
  Pass pass_;
  // Set if this rank has left a pass by an exception. It has the counts that this rank sent; after
  // the wait, their sums over all ranks.
  std::optional<Attention> abandoned_;
  std::function<void()> wait_for_abandoned_;
  int64_t newest_abandoned_forward_ = 0;
  // The counts of the first pass in which the ranks were in different steps, which every later pass
  // reports again.
  std::optional<Attention> apart_;
  // Outputs may outlive the wrapper, so their hooks hold a weak reference to this pointer.
  std::shared_ptr<Reducer*> self_;
  std::shared_ptr<wrap::AccumulationHooks>
      hooks_;  // the destructor removes them; hooks of outputs share the pointer
};

}  // namespace cadre::reduction
