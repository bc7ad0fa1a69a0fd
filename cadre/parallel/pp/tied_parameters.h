// Parameters of several stages that are one parameter of the model, such as an embedding in the
// first stage and the head in the last one: equal at the start, and with one gradient, the sum of
// what the stages computed.
//
// Threads: one. Blocking: tie(), check_equal() and, where parameters are tied, sum_gradients() are
// collectives of the pipeline's ranks, and tie() of its replicas, too; until the deadline of the
// groups. Lifetime: shares the tensors; keeps the groups; the sharded stages and the StageRecords
// outlive it. Errors: kInvalidArgument on all ranks; else as ProcessGroup.
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
    ShardedStages* sharded;          // is null if ranks have whole stages
    StageRecords* records;
  };
  // messages: a message space on the pipeline's group.
  TiedParameters(PipelineRanks ranks, PrivateMessages messages, Stages stages);

  // Ties these parameters: gives all of them the values of the first, from now on.
  void tie(const std::vector<StageParameter>& parameters);
  bool is_empty() const { return ties_.empty(); }
  // Sums the gradients of each tied parameter in the order of ranks, so that all holders have the
  // same bits. A parameter that no stage has used stays without a gradient.
  void sum_gradients() const;
  // Throws if the values of tied parameters differ.
  void check_equal() const;

  // Returns, for each tie, whether this rank's tensors require grad. check_trained() compares these
  // words.
  std::vector<int64_t> trained_words() const;
  size_t num_trained_words() const { return ties_.size(); }
  // words: by rank; from the index `first` on they are trained_words(). Throws, the same on all
  // ranks, if a tied parameter requires grad in only a part of its stages.
  void check_trained(const std::vector<std::vector<int64_t>>& words, size_t first) const;

 private:
  struct Tie {
    std::string text;             // names the parameters in messages
    std::set<int> stages = {};    // the stages of this rank that have the tied parameter
    std::vector<int> ranks = {};  // the ranks that hold it, in ascending order, each once
    int root = 0;  // all tensors get the values of this rank, which is one of `ranks`
    // The tensors of this rank, of which the root's first one comes first.
    std::vector<at::Tensor> own = {};
  };

  // Fills `tie` with the holders of the parameters; returns an error if the list is invalid.
  std::optional<Error> find_holders(const std::vector<StageParameter>& parameters, Tie& tie) const;
  // Returns another tensor of this rank that begins in the same memory, as after set_data();
  // nullopt if there is none.
  std::optional<StageParameter> sharer_of_memory(const NamedTensor& parameter) const;
  // Throws on all ranks of the pipeline, or on none.
  void check(const std::vector<StageParameter>& parameters, Tie& tie) const;
  // Returns the root's tensor on every holder: `tensor` itself on the root, which sends it to
  // others.
  at::Tensor from_root(const Tie& tie, const at::Tensor& tensor) const;
  void broadcast(const Tie& tie) const;
  void sum_gradients(const Tie& tie) const;
  // Returns whether the values of this rank equal those of the root.
  bool are_equal(const Tie& tie) const;

  PipelineRanks ranks_;
  PrivateMessages messages_;
  Stages stages_;
  std::vector<Tie> ties_;
};

}  // namespace cadre::parallel
