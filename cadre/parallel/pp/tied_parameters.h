// Ties parameters of several stages that are one parameter of the model, such as an embedding in
// the first stage and the head in the last one: gives them equal values at the start, and in each
// step the same gradient, the sum of the stages' gradients.
//
// Threads: one thread. Blocking: tie(), check_equal() and, if parameters are tied, sum_gradients()
// are collectives of the pipeline's ranks; tie() is also a collective of the replicas. They wait
// until the deadline of the groups. Lifetime: shares the tensors; keeps the groups; the sharded
// stages and the StageRecords must outlive it. Errors: kInvalidArgument on all ranks; else as
// ProcessGroup.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cadre/parallel/pp/pipeline_agreement.h"
#include "cadre/parallel/pp/pipeline_stage.h"
#include "cadre/parallel/pp/sharded_stages.h"
#include "cadre/parallel/pp/stage_records.h"
#include "cadre/tensor/group/messages/private_messages.h"

namespace cadre::parallel {

class TiedParameters {
 public:
  struct Stages {
    std::vector<int> rank_of_stage;
    std::vector<PipelineStage> own;  // the stages of this rank
    ShardedStages* sharded;          // null if ranks have whole stages
    StageRecords* records;
  };
  // `messages` is a message space on the pipeline's group.
  TiedParameters(PipelineRanks ranks, PrivateMessages messages, Stages stages);

  // Ties these parameters: copies the value of the first one to all of them.
  void tie(const std::vector<StageParameter>& parameters);
  bool is_empty() const { return ties_.empty(); }
  // Sums the gradients of each tied parameter in rank order, so that all ranks that have it get the
  // same bits. If no stage has used a parameter, it stays without a gradient.
  void sum_gradients() const;
  // Throws if the values of tied parameters differ between ranks.
  void check_equal() const;

  // Returns one integer for each tie, which says whether this rank's tensors of the tie require
  // grad. check_trained() compares these integers of all ranks.
  std::vector<int64_t> trained_words() const;
  size_t num_trained_words() const { return ties_.size(); }
  // words[rank] has the trained_words() of that rank, which begin at the index `first`. Throws, the
  // same on all ranks, if a tied parameter requires grad in only some of its stages.
  void check_trained(const std::vector<std::vector<int64_t>>& words, size_t first) const;

 private:
  struct Tie {
    std::string text;             // the names of the parameters, for messages
    std::set<int> stages = {};    // the stages of this rank that have the tied parameter
    std::vector<int> ranks = {};  // the ranks that have it, in ascending order, each once
    int root = 0;                 // the rank whose values all tensors get; one of `ranks`
    // This rank's tensors of the tie. On the root, the tensor whose value is copied comes first.
    std::vector<at::Tensor> own = {};
  };

  // Fills `tie` with the ranks and tensors of the parameters. Returns an error if the list is
  // invalid.
  std::optional<Error> find_holders(const std::vector<StageParameter>& parameters, Tie& tie) const;
  // Returns another parameter of this rank that begins in the same memory, as set_data() can cause;
  // nullopt if there is none.
  std::optional<StageParameter> sharer_of_memory(const NamedTensor& parameter) const;
  // Runs all checks of tie(). Throws on all ranks of the pipeline, or on none.
  void check(const std::vector<StageParameter>& parameters, Tie& tie) const;
  // Sends the root's tensor to all ranks that have the tied parameter, and returns it. On the root
  // itself it returns `tensor`.
  at::Tensor from_root(const Tie& tie, const at::Tensor& tensor) const;
  void broadcast(const Tie& tie) const;
  void sum_gradients(const Tie& tie) const;
  // Returns whether this rank's values equal those of the root.
  bool are_equal(const Tie& tie) const;

  PipelineRanks ranks_;
  PrivateMessages messages_;
  Stages stages_;
  std::vector<Tie> ties_;
};

}  // namespace cadre::parallel
