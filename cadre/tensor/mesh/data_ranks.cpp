#include "cadre/tensor/mesh/data_ranks.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {
namespace {

constexpr std::array<std::string_view, 4> kSplitAxes = {"dp", "dp_replicate", "dp_shard", "ep"};
constexpr std::array<std::string_view, 3> kSharedAxes = {"pp", "cp", "tp"};

[[noreturn]] void refuse(const DeviceMesh& mesh, const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, format("data_ranks {}: {}", mesh.to_string(), problem));
}

bool has(const auto& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

}  // namespace

at::Tensor DataRanks::mean(const at::Tensor& value) const {
  at::Tensor result = value.detach().clone();
  if (group) group->all_reduce(result, {.op = ReduceOp::kAvg});
  return result;
}

DataRanks data_ranks(const DeviceMesh& mesh, const DataRanksOptions& options) {
  if (mesh.size() != mesh.whole().size()) {
    refuse(mesh, format("this mesh is a slice of {}, whose other axes also determine which rows a "
                        "rank has; pass the whole mesh",
                        mesh.whole().to_string()));
  }
  for (const auto* names : {&options.split_axes, &options.shared_axes}) {
    for (const std::string& name : *names) mesh.size(name);  // throws for an unknown name
  }
  std::vector<std::string> split;
  for (const MeshAxis& axis : mesh.axes()) {
    const bool is_given_split = has(options.split_axes, axis.name);
    const bool is_given_shared = has(options.shared_axes, axis.name);
    if (is_given_split && is_given_shared) {
      refuse(mesh, format("the options name \"{}\" as an axis with different rows and as one with "
                          "the same rows; name it once",
                          axis.name));
    }
    if (is_given_split || (!is_given_shared && has(kSplitAxes, axis.name))) {
      split.push_back(axis.name);
    } else if (!is_given_shared && !has(kSharedAxes, axis.name)) {
      refuse(mesh,
             format("it is not known whether ranks along \"{}\" have different rows of a batch. "
                    "Name it in split_axes of the options if they do, else in shared_axes; "
                    "the names dp, dp_replicate, dp_shard, ep, pp, cp and tp are known",
                    axis.name));
    }
  }
  if (split.empty()) return {};
  const ProcessGroup& group = mesh.joint_group(split);
  return {.rank = group.rank(), .size = group.world_size(), .group = group};
}

}  // namespace cadre
