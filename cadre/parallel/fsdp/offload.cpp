#include "cadre/parallel/fsdp/offload.h"

#include <map>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/tensor/group/agreement.h"

namespace cadre::parallel {

namespace {

constexpr const char* kWhat = "FullyShardedDataParallel, rank {}: options.offload";

// Every tensor takes whole pages: a shard and its gradients one each, the state of each parameter
// `num_states`.
int64_t bytes_of(const std::vector<NamedTensor>& parameters, at::ScalarType dtype,
                 const wrap::LocatedGroup& shard, int num_states) {
  std::vector<int64_t> numels;
  for (const NamedTensor& parameter : parameters) numels.push_back(parameter.tensor.numel());
  const int64_t alignment = FlatParametersOptions().alignment;
  const FlatLayout layout(numels, shard.world_size(),
                          {.of_shards = alignment, .of_tensors = alignment});
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t shard_bytes = FileMemory::in_pages(layout.shard_numel() * size);
  int64_t num_bytes = shard_bytes;
  bool is_trained = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].tensor.requires_grad()) continue;
    is_trained = true;
    const int64_t numel = layout.range(i, shard.rank()).size();
    num_bytes += num_states * FileMemory::in_pages(numel * size);
  }
  return is_trained ? num_bytes + shard_bytes : num_bytes;
}

int64_t needed_bytes(const FileOffload& offload, const UnitAssignment& assignment,
                     const wrap::LocatedGroup& shard) {
  int64_t num_bytes = 0;
  for (const AssignedUnit& unit : assignment.units) {
    std::map<at::ScalarType, std::vector<NamedTensor>> by_dtype;
    for (const NamedTensor& parameter : unit.parameters) {
      by_dtype[parameter.tensor.scalar_type()].push_back(parameter);
    }
    for (const auto& [dtype, parameters] : by_dtype) {
      num_bytes += bytes_of(parameters, dtype, shard, offload.num_states);
    }
  }
  return num_bytes;
}

}  // namespace

std::shared_ptr<FileMemory> open_offload(const std::optional<FileOffload>& offload,
                                         const UnitAssignment& assignment,
                                         const OffloadGroups& groups) {
  if (!offload) return nullptr;
  std::shared_ptr<FileMemory> files;
  check_on_all_ranks(groups.all.process_group(), "FullyShardedDataParallel", [&] {
    try {
      files = FileMemory::open(offload->folder);
      files->reserve(needed_bytes(*offload, assignment, groups.shard));
    } catch (const Error& error) {
      throw error.with_context(format(kWhat, groups.all.rank()));
    }
  });
  return files;
}

}  // namespace cadre::parallel
