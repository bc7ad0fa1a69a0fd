#include "cadre/train/trainer/planning/part_sizes.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace cadre::train {
namespace {

constexpr int64_t kValueBytes = sizeof(float);
constexpr std::string_view kTiedWeight = "wte.weight";

int64_t divided_up(int64_t number, int64_t divisor) {
  return (number + divisor - 1) / divisor;
}

// Returns the number in the name of a block's parameter: 3 for "h_3.ln_1.weight"; nullopt for other
// names.
std::optional<int64_t> block_of(std::string_view name) {
  if (!name.starts_with("h_")) return std::nullopt;
  int64_t block = 0;
  std::from_chars(name.data() + 2, name.data() + name.size(), block);
  return block;
}

// Returns the dimension along which Gpt::plan() divides the parameter; nullopt if it stays whole.
std::optional<size_t> divided_dim(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, size_t>, 8> kDivided = {
      {{"wte.weight", 0},
       {"lm_head.weight", 0},
       {"attn_c_attn.weight", 0},
       {"attn_c_attn.bias", 0},
       {"attn_c_proj.weight", 1},
       {"mlp_c_fc.weight", 0},
       {"mlp_c_fc.bias", 0},
       {"mlp_c_proj.weight", 1}}};
  const auto found = std::ranges::find_if(
      kDivided, [&](const auto& entry) { return name.ends_with(entry.first); });
  return found == kDivided.end() ? std::nullopt : std::optional<size_t>(found->second);
}

bool is_expert(std::string_view name) {
  return name.ends_with("mlp_experts.up_weight") || name.ends_with("mlp_experts.down_weight");
}

class StagesOfRank {
 public:
  StagesOfRank(const Config& config, const Degrees& degrees, int rank)
      : rank_(rank), is_tied_(config.model.tied) {
    if (degrees.pipeline > 1) {
      const PipelineSchedule schedule = pipeline_schedule(config, degrees);
      holders_ = schedule.rank_of_stage;
      num_microbatches_ = schedule.num_microbatches;
    }
    blocks_of_stage_ = config.model.layers / static_cast<int64_t>(holders_.size());
  }

  bool has(std::string_view name) const {
    if (const auto block = block_of(name)) {
      return holders_[static_cast<size_t>(*block / blocks_of_stage_)] == rank_;
    }
    if (name.starts_with("ln_f") || name.starts_with("lm_head")) return has_last();
    const bool is_of_both_ends = is_tied_ && name.starts_with("wte");
    return has_first() || (is_of_both_ends && has_last());
  }
  bool has_first() const { return holders_.front() == rank_; }
  bool has_last() const { return holders_.back() == rank_; }
  // Returns whether this process and another one both have the tied weight, so that they must
  // exchange its gradient.
  bool shares_tied_weight() const {
    return is_tied_ && holders_.front() != holders_.back() && (has_first() || has_last());
  }
  bool has_both_ends_of_a_tie() const { return is_tied_ && has_first() && has_last(); }
  std::optional<int64_t> num_microbatches() const { return num_microbatches_; }
  int64_t num_blocks() const { return blocks_of_stage_ * std::ranges::count(holders_, rank_); }
  // Returns how often this process receives a batch's activations or their gradients from another
  // process.
  int64_t num_received() const {
    int64_t count = 0;
    for (size_t stage = 0; stage < holders_.size(); ++stage) {
      if (holders_[stage] != rank_) continue;
      if (stage > 0 && holders_[stage - 1] != rank_) ++count;
      if (stage + 1 < holders_.size() && holders_[stage + 1] != rank_) ++count;
    }
    return count;
  }

 private:
  std::vector<int> holders_ = {0};  // holders_[s] is the rank that has stage s
  std::optional<int64_t> num_microbatches_;
  int rank_;
  bool is_tied_;
  int64_t blocks_of_stage_ = 1;
};

int64_t bytes_of(const ModelSizes& part, const std::function<bool(std::string_view)>& counts) {
  int64_t sum = 0;
  for (const ParameterSize& parameter : part.parameters) {
    if (counts(parameter.name)) sum += parameter.numel() * kValueBytes;
  }
  return sum;
}

// `activation` is the number of bytes of one layer's output, for all tokens of a process.
int64_t tensor_traffic(const ModelSizes& part, const Config& config, int64_t activation,
                       const StagesOfRank& stages) {
  const int64_t num_backwards = stages.num_microbatches().value_or(config.run.accumulate);
  const bool is_sequence = config.parallel.sequence;
  // An all_reduce moves 2 * `activation` bytes; under sequence parallelism, an all_gather or a
  // reduce_scatter moves `activation`. A block has two all_reduces in the forward and two in the
  // backward. Under sequence parallelism, the inputs that blocks and head have gathered are
  // gathered again in the backward. Experts are not divided, so a block with experts has half as
  // many.
  const int64_t of_a_block = is_sequence ? 10 : config.model.experts > 0 ? 4 : 8;
  int64_t count = stages.num_blocks() * of_a_block;
  if (stages.has_first()) count += 2;
  if (stages.has_last()) count += is_sequence ? 3 : 2;
  int64_t bytes = count * activation;
  // The vocabulary-parallel loss exchanges three numbers for each token.
  if (stages.has_last()) bytes += 2 * 3 * activation / config.model.width;
  // The gradients of layers that see only a part of the sequence are summed after each backward.
  if (is_sequence) {
    bytes += 2 * num_backwards * bytes_of(part, [](std::string_view name) {
               return name.starts_with("wpe") || name.find("ln_") != std::string_view::npos;
             });
  }
  return bytes * (config.parallel.tensor - 1) / config.parallel.tensor;
}

int64_t context_traffic(const ModelSizes& part, const Config& config, int64_t activation,
                        const StagesOfRank& stages) {
  const int64_t size = config.parallel.context;
  const int64_t of_heads = activation / config.parallel.tensor;
  // Ring attention sends keys and values around the ring in the forward and again in the backward,
  // and their gradients once in the backward. all_to_all attention exchanges eight tensors, four
  // before and four after attention.
  const int64_t of_a_block = config.parallel.attention == "ring"
                                 ? 4 * (size - 1) * of_heads + 2 * size * of_heads
                                 : 8 * of_heads * (size - 1) / size;
  const int64_t gradients = bytes_of(part, [](std::string_view) { return true; });
  return stages.num_blocks() * of_a_block + 2 * gradients * (size - 1) / size;
}

// The rows of tokens travel to the experts and back, in the forward and in the backward. The
// gradients of all other parameters are summed.
int64_t expert_traffic(const ModelSizes& part, const Config& config, int64_t activation,
                       const StagesOfRank& stages) {
  const int64_t size = config.parallel.expert;
  const int64_t rows = stages.num_blocks() * 4 * config.model.experts_per_token * activation;
  const int64_t gradients = bytes_of(part, [](std::string_view name) { return !is_expert(name); });
  return (rows + 2 * gradients) * (size - 1) / size;
}

}  // namespace

ModelSizes part_sizes(const ModelSizes& whole, const Config& config, const Degrees& degrees,
                      int pipeline_rank) {
  ModelSizes part = whole;
  part.parameters.clear();
  if (degrees.pipeline > 1) part.units.resize(1);
  const StagesOfRank stages(config, degrees, pipeline_rank);
  for (ParameterSize parameter : whole.parameters) {
    if (!stages.has(parameter.name)) continue;
    if (const auto dim = divided_dim(parameter.name)) {
      parameter.sizes[*dim] = divided_up(parameter.sizes[*dim], degrees.tensor);
    }
    if (is_expert(parameter.name)) parameter.sizes[0] /= degrees.expert;
    if (degrees.pipeline > 1) parameter.unit = 0;
    part.parameters.push_back(std::move(parameter));
  }
  return part;
}

int64_t tied_copy_bytes(const ModelSizes& part, const Config& config, const Degrees& degrees,
                        int pipeline_rank) {
  if (degrees.pipeline == 1 ||
      !StagesOfRank(config, degrees, pipeline_rank).has_both_ends_of_a_tie()) {
    return 0;
  }
  return bytes_of(part, [](std::string_view name) { return name == kTiedWeight; });
}

// docs/guide/parallel/which-strategy.md explains these formulas.
DivisionTraffic division_traffic(const ModelSizes& part, const Config& config,
                                 const Degrees& degrees, int pipeline_rank) {
  const StagesOfRank stages(config, degrees, pipeline_rank);
  const int64_t rows = divided_up(config.run.global_batch_size, degrees.num_shares());
  const int64_t tokens = config.model.context / degrees.context;
  const int64_t activation = rows * tokens * config.model.width * kValueBytes;
  DivisionTraffic traffic;
  if (degrees.tensor > 1) traffic.tensor = tensor_traffic(part, config, activation, stages);
  if (degrees.context > 1) traffic.context = context_traffic(part, config, activation, stages);
  if (degrees.expert > 1) traffic.expert = expert_traffic(part, config, activation, stages);
  if (degrees.pipeline > 1) {
    const int64_t sent = config.parallel.sequence ? activation / degrees.tensor : activation;
    traffic.pipeline = stages.num_received() * sent;
    if (stages.shares_tied_weight()) {
      traffic.pipeline += bytes_of(part, [](std::string_view name) { return name == kTiedWeight; });
    }
  }
  return traffic;
}

}  // namespace cadre::train
