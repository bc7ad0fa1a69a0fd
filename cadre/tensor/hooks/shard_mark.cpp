#include "cadre/tensor/hooks/shard_mark.h"

#include <c10/core/TensorImpl.h>

#include <optional>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"

namespace cadre::wrap {
namespace {

// BackendMeta is the only member of a tensor in which other libraries can store data.
struct MarkMeta final : c10::BackendMeta {
  std::optional<ShardMark> of_shard;
  std::optional<StageMark> of_stage;
};

const MarkMeta* marks_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  return dynamic_cast<const MarkMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

// detach() shares the marks with the new tensor, so marks are replaced by a changed copy and never
// changed in place.
template <typename Change>
void change_marks(const at::Tensor& tensor, Change change) {
  auto marks = c10::make_intrusive<MarkMeta>();
  if (const MarkMeta* const earlier = marks_of(tensor)) {
    marks->of_shard = earlier->of_shard;
    marks->of_stage = earlier->of_stage;
  }
  change(*marks);
  tensor.unsafeGetTensorImpl()->set_backend_meta(std::move(marks));
}

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
  change_marks(tensor, [&](MarkMeta& marks) { marks.of_shard = std::move(mark); });
}

void mark_as_of_stage(const at::Tensor& tensor, StageMark mark) {
  change_marks(tensor, [&](MarkMeta& marks) { marks.of_stage = std::move(mark); });
}

const ShardMark* shard_mark_of(const at::Tensor& tensor) {
  const MarkMeta* const marks = marks_of(tensor);
  return marks != nullptr && marks->of_shard ? &*marks->of_shard : nullptr;
}

void refuse_shards(std::span<const at::Tensor> parameters, std::string_view call,
                   std::string_view arguments) {
  const auto refuse = [&](size_t index, const std::string& what) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{0}: parameter {2} of {3} in the list is {4}, so the list has other "
                       "gradients on each rank, and the ranks would come to different results. "
                       "Call {0}(model{1}) with the wrapper or the pipeline that made the shards. "
                       "For a module that parallelize_module() has divided, also within "
                       "DistributedDataParallel, call {0}(records{1}) with the records that "
                       "parallelize_module() returned",
                       call, arguments, index, parameters.size(), what));
  };
  for (size_t i = 0; i < parameters.size(); ++i) {
    const MarkMeta* const marks = marks_of(parameters[i]);
    if (marks == nullptr) continue;
    if (const auto& mark = marks->of_shard) {
      refuse(i, format("this rank's shard of \"{}\", {} (rank {} of the {} that divide it)",
                       mark->parameter, mark->owner, mark->rank, mark->num_ranks));
    }
    if (const auto& mark = marks->of_stage) {
      refuse(i, format("\"{}\" of stage {} (rank {} of the {} of its pipeline)", mark->parameter,
                       mark->stage, mark->rank, mark->num_ranks));
    }
  }
}

void refuse_shard_as_whole(std::string_view name, const at::Tensor& tensor, std::string_view call,
                           std::string_view remedy) {
  const ShardMark* const mark = shard_mark_of(tensor);
  if (mark == nullptr) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: \"{}\" is not the whole parameter, but this rank's shard of it, {} (rank "
                     "{} of the {} that divide it). {}",
                     call, name, mark->owner, mark->rank, mark->num_ranks, remedy));
}

}  // namespace cadre::wrap
