// Lists the layouts (mesh axes with a way to divide the model along each) in which the tests of
// meshes of several axes train.
//
// Threads: plain values. Blocking: never.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/testing/torch/axes_training.h"

namespace cadre::testing {

// Some layouts have a head that is tied to the embedding, and some have an untied one, so that both
// are covered.
inline std::vector<Layout> axes_layouts() {
  constexpr AxesGptKind kUntied{.is_tied = false};
  constexpr AxesGptKind kSequence{.is_sequence_parallel = true};
  constexpr AxesGptKind kUntiedSequence{.is_tied = false, .is_sequence_parallel = true};
  constexpr AxesGptKind kExperts{.has_experts = true};
  using enum DataStrategy;
  return {
      {.name = "dp_x_tp", .axes = {{"dp", 2}, {"tp", 2}}},
      {.name = "dp_x_tp_sequence", .axes = {{"dp", 2}, {"tp", 4}}, .kind = kUntiedSequence},
      {.name = "zero1_x_tp", .axes = {{"dp", 2}, {"tp", 2}}, .sharding = kZero1},
      {.name = "fsdp_x_tp", .axes = {{"dp_shard", 2}, {"tp", 2}}, .sharding = kFsdp},
      {.name = "hsdp_x_tp",
       .axes = {{"dp_replicate", 2}, {"dp_shard", 2}, {"tp", 2}},
       .sharding = kHsdp,
       .kind = kUntied},
      // The vocabulary and the hidden features are not divisible by 3 ranks, so the flat buffers of
      // tensor-parallel ranks have different sizes, and the shards of a replicated parameter are
      // cut at different elements.
      {.name = "zero1_x_tp_uneven",
       .axes = {{"dp", 2}, {"tp", 3}},
       .sharding = kZero1,
       .kind = kUntied},
      {.name = "fsdp_x_tp_uneven", .axes = {{"dp_shard", 2}, {"tp", 3}}, .sharding = kFsdp},
      {.name = "dp_x_cp", .axes = {{"dp", 2}, {"cp", 2}}, .kind = kUntied},
      {.name = "fsdp_x_cp", .axes = {{"dp_shard", 2}, {"cp", 2}}, .sharding = kFsdp},
      {.name = "cp_x_tp", .axes = {{"cp", 2}, {"tp", 2}}, .kind = kSequence},
      {.name = "dp_x_cp_x_tp", .axes = {{"dp", 2}, {"cp", 2}, {"tp", 2}}},
      {.name = "dp_x_ep", .axes = {{"dp", 2}, {"ep", 2}}, .kind = kExperts},
      {.name = "ep_x_tp", .axes = {{"ep", 2}, {"tp", 2}}, .kind = kExperts},
      {.name = "dp_x_ep_x_tp", .axes = {{"dp", 2}, {"ep", 2}, {"tp", 2}}, .kind = kExperts},
      {.name = "fsdp_x_ep",
       .axes = {{"dp_shard", 2}, {"ep", 2}},
       .sharding = kFsdp,
       .kind = kExperts},
      {.name = "dp_x_ep_x_cp", .axes = {{"dp", 2}, {"ep", 2}, {"cp", 2}}, .kind = kExperts},
      {.name = "pp_x_dp", .axes = {{"pp", 2}, {"dp", 2}}},
      {.name = "pp_x_tp", .axes = {{"pp", 2}, {"tp", 2}}, .num_microbatches = 4},
      {.name = "pp_x_tp_sequence", .axes = {{"pp", 2}, {"tp", 2}}, .kind = kUntiedSequence},
      {.name = "pp_x_dp_x_tp",
       .axes = {{"pp", 2}, {"dp", 2}, {"tp", 2}},
       .schedule = "zb-h1",
       .num_microbatches = 4},
      {.name = "pp_x_fsdp", .axes = {{"pp", 2}, {"dp_shard", 2}}, .sharding = kFsdp},
      {.name = "pp_x_fsdp_interleaved",
       .axes = {{"pp", 2}, {"dp_shard", 2}},
       .sharding = kFsdp,
       .kind = kUntied,
       .schedule = "interleaved-1f1b",
       .num_microbatches = 4,
       .stages_per_rank = 2},
      {.name = "pp_x_hsdp",
       .axes = {{"pp", 2}, {"dp_replicate", 2}, {"dp_shard", 2}},
       .sharding = kHsdp},
      {.name = "pp_x_fsdp_x_tp",
       .axes = {{"pp", 2}, {"dp_shard", 2}, {"tp", 2}},
       .sharding = kFsdp},
      {.name = "pp_x_fsdp_x_tp_uneven",
       .axes = {{"pp", 2}, {"dp_shard", 2}, {"tp", 3}},
       .sharding = kFsdp,
       .kind = kUntied},
      {.name = "pp_x_cp", .axes = {{"pp", 2}, {"cp", 2}}, .kind = kUntied},
      {.name = "pp_x_cp_x_tp", .axes = {{"pp", 2}, {"cp", 2}, {"tp", 2}}},
  };
}

inline Layout axes_layout(const std::string& name) {
  const std::vector<Layout> layouts = axes_layouts();
  return *std::ranges::find(layouts, name, &Layout::name);
}

}  // namespace cadre::testing
