#include "cadre/train/common_error.h"

#include <ATen/ops/empty.h>

#include <array>
#include <cstring>
#include <optional>
#include <string>

namespace cadre::train {
namespace {

// What a rank sends: the code of its error, or kNoError, and the length of the message.
constexpr int64_t kNoError = -1;
constexpr int64_t kNumFields = 2;

}  // namespace

bool is_group_failure(const Error& error) {
  return error.code() == ErrorCode::kTimeout || error.code() == ErrorCode::kPeerLost ||
         error.code() == ErrorCode::kAborted;
}

void with_common_errors(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    if (is_group_failure(error)) throw;
    throw CommonError(error);
  }
}

void on_all_ranks(const ProcessGroup& world, const std::function<void()>& prepare) {
  std::optional<Error> own;
  try {
    prepare();
  } catch (const Error& error) {
    own = error;
  }
  const at::Tensor mine = at::empty({kNumFields}, at::kLong);
  mine.mutable_data_ptr<int64_t>()[0] = own ? static_cast<int64_t>(own->code()) : kNoError;
  mine.mutable_data_ptr<int64_t>()[1] = own ? static_cast<int64_t>(own->message().size()) : 0;
  const at::Tensor gathered = at::empty({kNumFields * world.world_size()}, at::kLong);
  world.all_gather_into_tensor(gathered, mine);
  const auto* fields = gathered.const_data_ptr<int64_t>();
  for (int rank = 0; rank < world.world_size(); ++rank, fields += kNumFields) {
    if (fields[0] == kNoError) continue;
    const at::Tensor text = at::empty({fields[1]}, at::kByte);
    if (world.rank() == rank) {
      std::memcpy(text.mutable_data_ptr(), own->message().data(), own->message().size());
    }
    world.broadcast(text, {.root = rank});
    const std::string message(static_cast<const char*>(text.const_data_ptr()),
                              static_cast<size_t>(fields[1]));
    throw CommonError(Error(static_cast<ErrorCode>(fields[0]), message));
  }
}

}  // namespace cadre::train
