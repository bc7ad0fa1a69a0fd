#include "cadre/parallel/reduction/buffer_broadcast.h"

#include <ATen/ops/zeros.h>

#include <utility>

#include "cadre/tensor/hooks/replica_check.h"
#include "cadre/tensor/hooks/tensor_version.h"

namespace cadre::reduction {

BufferBroadcast::BufferBroadcast(const std::vector<NamedTensor>& buffers, wrap::LocatedGroup group,
                                 uint32_t wrapper)
    : group_(std::move(group)),
      wrapper_(wrapper),
      header_(at::zeros({1 + static_cast<int64_t>(buffers.size())}, at::kLong)) {
  sent_.push_back({"", header_});
  sent_.insert(sent_.end(), buffers.begin(), buffers.end());
  for (const NamedTensor& buffer : buffers) versions_.push_back(wrap::version_of(buffer.tensor));
}

bool BufferBroadcast::has_moved(size_t buffer) const {
  return wrap::version_of(sent_[1 + buffer].tensor) != versions_[buffer];
}

bool BufferBroadcast::run() {
  if (versions_.empty()) return true;
  auto* const header = header_.mutable_data_ptr<int64_t>();
  header[0] = wrapper_;
  std::vector<bool> have_moved;
  for (size_t i = 0; i < versions_.size(); ++i) {
    have_moved.push_back(has_moved(i));
    header[1 + i] = have_moved[i] ? 1 : 0;
  }
  wrap::broadcast_tensors(sent_, /*root=*/0, group_, [&](size_t place) {
    return place > 0 && (have_moved[place - 1] || header[place] != 0);
  });
  for (size_t i = 0; i < versions_.size(); ++i)
    versions_[i] = wrap::version_of(sent_[1 + i].tensor);
  return header[0] == wrapper_;
}

}  // namespace cadre::reduction
