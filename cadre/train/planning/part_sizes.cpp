#include "cadre/train/planning/part_sizes.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace cadre::train {
namespace {

constexpr int64_t kValueBytes = sizeof(float);

int64_t divided_up(int64_t number, int64_t divisor) {
  return (number + divisor - 1) / divisor;
}

// Of a name "h_3.ln_1.weight" 3.
std::optional<int64_t> block_of(std::string_view name) {
  if (!name.starts_with("h_")) return std::nullopt;
  int64_t block = 0;
  std::from_chars(name.data() + 2, name.data() + name.size(), block);
  return block;
}

// The dimension that Gpt::plan() divides.
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

class StagesOfRank {
 public:
  StagesOfRank(const Config& config, const Degrees& degrees, int rank)
      : is_tied_(config.model.tied) {
    if (degrees.pipeline == 1) {
      is_held_ = {true};
    } else {
      for (const int holder : pipeline_schedule(config, degrees).rank_of_stage) {
        is_held_.push_back(holder == rank);
      }
    }
    blocks_of_stage_ = config.model.layers / static_cast<int64_t>(is_held_.size());
  }

  bool has(std::string_view name) const {
    if (const auto block = block_of(name)) {
      return is_held_[static_cast<size_t>(*block / blocks_of_stage_)];
    }
    if (name.starts_with("ln_f") || name.starts_with("lm_head")) return is_held_.back();
    const bool is_of_both_ends = is_tied_ && name.starts_with("wte");
    return is_held_.front() || (is_of_both_ends && is_held_.back());
  }

 private:
  bool is_tied_;
  std::vector<bool> is_held_;  // by stage
  int64_t blocks_of_stage_ = 1;
};

}  // namespace

ModelSizes part_sizes(const ModelSizes& whole, const Config& config, const Degrees& degrees,
                      int pipeline_rank) {
  ModelSizes part = whole;
  part.parameters.clear();
  if (degrees.pipeline > 1) part.units.resize(1);
  const StagesOfRank stages(config, degrees, pipeline_rank);
  for (PlannedParameter parameter : whole.parameters) {
    if (!stages.has(parameter.name)) continue;
    if (const auto dim = divided_dim(parameter.name)) {
      parameter.sizes[*dim] = divided_up(parameter.sizes[*dim], degrees.tensor);
    }
    if (degrees.pipeline > 1) parameter.unit = 0;
    part.parameters.push_back(std::move(parameter));
  }
  return part;
}

// The formulas are those of docs/guide/which-strategy.md.
DivisionTraffic division_traffic(const ModelSizes& part, const Config& config,
                                 const Degrees& degrees) {
  const int64_t rows = divided_up(config.run.global_batch_size, degrees.data);
  const int64_t tokens = config.model.context / degrees.context;
  const int64_t activation = rows * tokens * config.model.width * kValueBytes;  // between layers
  const int64_t blocks = config.model.layers / degrees.pipeline;
  const int64_t tp = degrees.tensor;
  const int64_t cp = degrees.context;
  DivisionTraffic traffic;
  if (tp > 1) {
    const int64_t of_others = activation * (tp - 1) / tp;
    // Twice in the forward and twice in the backward of each block: an all_reduce, or with sequence
    // parallelism a gather and a reduce_scatter, and the gather again in the backward.
    traffic.tensor = blocks * (config.parallel.sequence ? 10 : 8) * of_others;
    // Of embeddings, forward, and of the head, backward.
    traffic.tensor += (config.parallel.sequence ? 4 : 4) * of_others;
  }
  if (cp > 1) {
    int64_t parameters = 0;
    for (const PlannedParameter& parameter : part.parameters) parameters += parameter.numel();
    // Keys and values around the ring, and back with their gradients; or four exchanges of tokens
    // for heads in each direction. Each of the heads of this process.
    const int64_t own = activation / tp;
    traffic.context = config.parallel.attention == "ring"
                          ? blocks * (2 * (cp - 1) * own + 2 * (cp - 1) * own + 2 * cp * own)
                          : blocks * 8 * own * (cp - 1) / cp;
    traffic.context += 2 * parameters * kValueBytes * (cp - 1) / cp;
  }
  if (degrees.pipeline > 1) {
    // A stage in the middle receives an activation and a gradient for each of its stages.
    const int64_t shard = config.parallel.sequence ? activation / tp : activation;
    const bool has_middle = degrees.pipeline * config.parallel.virtual_stages > 2;
    traffic.pipeline = (has_middle ? 2 * config.parallel.virtual_stages : 1) * shard;
    for (const PlannedParameter& parameter : part.parameters) {
      if (config.model.tied && parameter.name == "wte.weight") {
        traffic.pipeline += parameter.numel() * kValueBytes;  // the gradient of the other end
      }
    }
  }
  return traffic;
}

}  // namespace cadre::train
