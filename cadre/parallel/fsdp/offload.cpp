#include "cadre/parallel/fsdp/offload.h"

#include <span>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/flat_layout.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/group/operands/dtype.h"

namespace cadre::parallel {

namespace {

constexpr const char* kWhat = "FullyShardedDataParallel, {}: options.offload";

// Returns the number of bytes that one FlatParameters needs in this rank's file: one tensor for the
// shard, one for its gradients and, for each parameter, `num_states` for the optimizer state. Each
// tensor takes whole pages.
int64_t bytes_of(std::span<const ParameterSize> parameters, const wrap::LocatedGroup& shard,
                 int num_states) {
  std::vector<int64_t> numels;
  for (const ParameterSize& parameter : parameters) numels.push_back(parameter.numel());
  const shard::FlatMemory memory(
      std::move(numels), shard.world_size(),
      {.dtype = to_scalar_type(parameters[0].dtype), .is_in_files = true});
  const shard::FlatBuffer buffer = *memory.buffers().shard;
  const int64_t shard_bytes = FileMemory::in_pages(buffer.num_bytes());
  int64_t num_bytes = shard_bytes;
  bool is_trained = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].is_trained) continue;
    is_trained = true;
    const int64_t numel = memory.layout().range(i, shard.rank()).size();
    num_bytes +=
        num_states *
        FileMemory::in_pages(shard::FlatBuffer{.numel = numel, .dtype = buffer.dtype}.num_bytes());
  }
  return is_trained ? num_bytes + shard_bytes : num_bytes;
}

int64_t needed_bytes(const FileOffload& offload, const UnitAssignment& assignment,
                     const wrap::LocatedGroup& shard) {
  int64_t num_bytes = 0;
  for (const AssignedUnit& unit : assignment.units) {
    const std::vector<ParameterSize> sizes = sizes_of(unit.parameters);
    for (const std::vector<size_t>& members : flats_of_unit(sizes)) {
      std::vector<ParameterSize> parameters;
      for (const size_t index : members) parameters.push_back(sizes[index]);
      num_bytes += bytes_of(parameters, shard, offload.num_states);
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
      throw error.with_context(format(kWhat, groups.all.rank_text()));
    }
  });
  return files;
}

}  // namespace cadre::parallel
