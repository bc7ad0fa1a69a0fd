#include "cadre/train/data/tensor_samples.h"

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/train/data/content_hash.h"

namespace cadre {

std::string_view sample_bytes(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

uint64_t digest_of(std::initializer_list<at::Tensor> tensors) {
  Fnv1a hash;
  for (const at::Tensor& tensor : tensors) {
    for (const int64_t size : tensor.sizes()) hash.add(static_cast<uint64_t>(size));
    hash.add(content_hash(sample_bytes(tensor)));
  }
  return hash.value();
}

void check_slice(std::string_view dataset, int64_t begin, int64_t end, int64_t size) {
  if (0 <= begin && begin <= end && end <= size) return;
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("{}: slice [{}, {}) of {} samples; expected 0 <= begin <= end <= {}",
                            dataset, begin, end, size, size));
}

}  // namespace cadre
