#include "cadre/layers/common_refusal.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <string>

#include "cadre/base/format.h"

namespace cadre::layers {
namespace {

// What a rank sends: the code of its error, or kNoError, and the length of the message.
constexpr int64_t kNoError = -1;
constexpr int64_t kNumFields = 2;

std::string broadcast_text(const std::string& own, int64_t size, Rank root,
                           const ProcessGroup& group) {
  const at::Tensor bytes = at::empty({size}, at::kByte);
  if (group.rank() == root) std::memcpy(bytes.mutable_data_ptr(), own.data(), own.size());
  group.broadcast(bytes, {.root = root});
  return std::string(static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(size));
}

}  // namespace

std::optional<CommonRefusal> common_refusal(const ProcessGroup& group,
                                            const std::function<void()>& check) {
  std::optional<Error> own;
  try {
    check();
  } catch (const Error& error) {
    own = error;
  }
  const at::Tensor mine = at::empty({kNumFields}, at::kLong);
  mine.mutable_data_ptr<int64_t>()[0] = own ? static_cast<int64_t>(own->code()) : kNoError;
  mine.mutable_data_ptr<int64_t>()[1] = own ? static_cast<int64_t>(own->message().size()) : 0;
  const at::Tensor gathered = at::empty({kNumFields * group.world_size()}, at::kLong);
  group.all_gather_into_tensor(gathered, mine);
  const int64_t* const fields = gathered.const_data_ptr<int64_t>();
  int num_refusing = 0;
  int lowest = 0;
  for (int rank = group.world_size() - 1; rank >= 0; --rank) {
    if (fields[kNumFields * rank] == kNoError) continue;
    ++num_refusing;
    lowest = rank;
  }
  if (num_refusing == 0) return std::nullopt;
  const auto code = static_cast<ErrorCode>(fields[kNumFields * lowest]);
  const std::string message = broadcast_text(own ? own->message() : std::string(),
                                             fields[kNumFields * lowest + 1], lowest, group);
  return CommonRefusal{.error = Error(code, message), .rank = lowest, .num_refusing = num_refusing};
}

void check_on_all_ranks(const ProcessGroup& group, const std::function<void()>& check) {
  if (group.world_size() == 1) {
    check();
    return;
  }
  const std::optional<CommonRefusal> refusal = common_refusal(group, check);
  if (!refusal) return;
  if (refusal->num_refusing == group.world_size()) throw refusal->error;
  throw Error(refusal->error.code(),
              format("{} (on rank {} of {} of group \"{}\")", refusal->error.message(),
                     refusal->rank, group.world_size(), group.name()))
      .with_culprit(refusal->rank);
}

}  // namespace cadre::layers
