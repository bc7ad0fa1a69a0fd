#include "cadre/tensor/hooks/shard_mark.h"

#include <c10/core/TensorImpl.h>

#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"

namespace cadre::wrap {
namespace {

// BackendMeta is the only member of a tensor in which other libraries can store data.
struct MarkMeta final : c10::BackendMeta {
  explicit MarkMeta(ShardMark given) : mark(std::move(given)) {}
  ShardMark mark;
};

}  // namespace

uint64_t part_of(const at::Tensor& parameter, int64_t first_element) {
  Fnv1a digest;
  digest.add(static_cast<uint64_t>(first_element));
  if (const ShardMark* const mark = shard_mark_of(parameter)) {
    digest.add(static_cast<uint64_t>(mark->rank));
    digest.add(static_cast<uint64_t>(mark->num_ranks));
    digest.add(mark->part);
  }
  return digest.value();
}

void mark_as_shard(const at::Tensor& tensor, ShardMark mark) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<MarkMeta>(std::move(mark)));
}

const ShardMark* shard_mark_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  const auto* meta =
      dynamic_cast<const MarkMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  return meta == nullptr ? nullptr : &meta->mark;
}

void refuse_shards(std::span<const at::Tensor> parameters, std::string_view call,
                   std::string_view remedy) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ShardMark* const mark = shard_mark_of(parameters[i]);
    if (mark == nullptr) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        format("{}, rank {}: parameter {} of {} in the list is this rank's shard of \"{}\", "
               "{}, so the list has other gradients on each rank, and the ranks would "
               "come to different results. {}",
               call, mark->rank, i, parameters.size(), mark->parameter, mark->owner, remedy));
  }
}

void refuse_shard_as_whole(std::string_view name, const at::Tensor& tensor, std::string_view call,
                           std::string_view remedy) {
  const ShardMark* const mark = shard_mark_of(tensor);
  if (mark == nullptr) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("{}, rank {}: \"{}\" is not the whole parameter, but this rank's shard of it, "
                     "{}. {}",
                     call, mark->rank, name, mark->owner, remedy));
}

}  // namespace cadre::wrap
