#include "cadre/tensor/optim/saved_part.h"

#include <torch/optim/optimizer.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <cstdint>
#include <optional>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/hooks/shard_mark.h"

namespace cadre::optim_state {
namespace {

// The keys that write_part() adds to an archive of torch::optim.
constexpr const char* kRankKey = "cadre/rank";
constexpr const char* kNumRanksKey = "cadre/num_ranks";
constexpr const char* kGroupsKey = "cadre/groups";
constexpr const char* kElementsKey = "cadre/elements";

struct Part {
  int64_t rank = 0;
  int64_t num_ranks = 1;
  std::string groups;    // hash of the groups, equal on all ranks
  std::string elements;  // hash of which elements this rank has
};

// Describes the shards in the groups; nullopt if no parameter is a shard.
std::optional<Part> part_of(const ParamGroups& param_groups) {
  Part part;
  bool has_shards = false;
  Fnv1a groups;
  Fnv1a elements;
  for (const torch::optim::OptimizerParamGroup& group : param_groups) {
    groups.add(group.params().size());
    for (const at::Tensor& parameter : group.params()) {
      const wrap::ShardMark* const mark = wrap::shard_mark_of(parameter);
      groups.add(mark == nullptr ? std::string_view("whole") : std::string_view(mark->parameter));
      groups.add(uint64_t{0});
      elements.add(static_cast<uint64_t>(parameter.numel()));
      if (mark == nullptr) continue;
      has_shards = true;
      part.rank = mark->rank;
      part.num_ranks = mark->num_ranks;
      elements.add(static_cast<uint64_t>(mark->rank));
      elements.add(static_cast<uint64_t>(mark->num_ranks));
      elements.add(mark->part);
    }
  }
  if (!has_shards) return std::nullopt;
  part.groups = format("{:016x}", groups.value());
  part.elements = format("{:016x}", elements.value());
  return part;
}

// Reads what write_part() has written; nullopt if a key is missing or has another type.
std::optional<Part> read_part(torch::serialize::InputArchive& archive) {
  c10::IValue rank;
  c10::IValue num_ranks;
  c10::IValue groups;
  c10::IValue elements;
  const bool is_there = archive.try_read(kRankKey, rank) && rank.isInt() &&
                        archive.try_read(kNumRanksKey, num_ranks) && num_ranks.isInt() &&
                        archive.try_read(kGroupsKey, groups) && groups.isString() &&
                        archive.try_read(kElementsKey, elements) && elements.isString();
  if (!is_there) return std::nullopt;
  return Part{.rank = rank.toInt(),
              .num_ranks = num_ranks.toInt(),
              .groups = groups.toStringRef(),
              .elements = elements.toStringRef()};
}

std::string rank_text(const Part& part) {
  return format("rank {} of {}", part.rank, part.num_ranks);
}

}  // namespace

void write_part(torch::serialize::OutputArchive& archive, const ParamGroups& groups) {
  const std::optional<Part> part = part_of(groups);
  if (!part) return;
  archive.write(kRankKey, c10::IValue(part->rank));
  archive.write(kNumRanksKey, c10::IValue(part->num_ranks));
  archive.write(kGroupsKey, c10::IValue(part->groups));
  archive.write(kElementsKey, c10::IValue(part->elements));
}

void check_part(torch::serialize::InputArchive& archive, const ParamGroups& groups,
                std::string_view optimizer, PartRule rule) {
  constexpr std::string_view kRemedy =
      "An archive has the state of one rank's shards: save and load one file for each rank, with "
      "the rank in its name, or use save_sharded() and load_sharded(), whose snapshots fit any "
      "number of ranks";
  const auto refuse = [&](const std::string& problem) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: the archive {}. {}", optimizer, problem, kRemedy));
  };
  const std::optional<Part> given = part_of(groups);
  const std::optional<Part> saved = read_part(archive);
  if (!saved) {
    if (!given || rule == PartRule::kIfWritten) return;
    refuse(
        format("does not say which rank's shards it has the state of; expected those of {}. It "
               "was written by another optimizer or by an older version",
               rank_text(*given)));
  }
  const Part own = given.value_or(Part());
  if (saved->num_ranks != own.num_ranks || saved->rank != own.rank) {
    refuse(format("has the state of the shards of {}; expected those of {}", rank_text(*saved),
                  rank_text(own)));
  }
  if (!given) return;  // whole parameters were saved and are loaded
  if (saved->groups != own.groups) {
    refuse(format("has the state of {} for other parameter groups", rank_text(*saved)));
  }
  if (saved->elements != own.elements) {
    refuse(
        format("has the state of {} for other elements of the parameters, as of a model that is "
               "divided in another way or of other sizes",
               rank_text(*saved)));
  }
}

}  // namespace cadre::optim_state
