#include "cadre/parallel/pp/tensor_header.h"

#include <ATen/ops/empty.h>

#include "cadre/core/base/format.h"
#include "cadre/core/base/types.h"
#include "cadre/tensor/group/operands/dtype.h"

namespace cadre::parallel {
namespace {

constexpr int64_t kMagic = 0x63616472'70703031;  // "cadrpp01"

Error corrupt(const std::string& what) {
  return {
      ErrorCode::kCorruption,
      format("the header of a pipeline's message {}; do all ranks run the same program?", what)};
}

constexpr int64_t kRequiresGrad = 1;
constexpr int64_t kIsOnDevice = 2;

bool can_require_grad(at::ScalarType dtype) {
  return at::isFloatingType(dtype);
}

Result<TensorHeader::Entry> decode_entry(std::span<const int64_t> words) {
  const int64_t dtype = words[0];
  const int64_t dim = words[2];
  if (dtype < 0 || dtype >= kNumDTypes) return corrupt(format("names dtype {}", dtype));
  TensorHeader::Entry entry{.dtype = to_scalar_type(static_cast<DType>(dtype)),
                            .requires_grad = (words[1] & kRequiresGrad) != 0,
                            .sizes = {},
                            .is_on_device = (words[1] & kIsOnDevice) != 0};
  if (words[1] < 0 || words[1] > (kRequiresGrad | kIsOnDevice)) {
    return corrupt(format("has the flags {} for a tensor, which must be 0 to 3", words[1]));
  }
  if (entry.requires_grad && !can_require_grad(entry.dtype)) {
    return corrupt(
        format("says that a tensor of {} requires grad, which is not possible for this dtype",
               to_string(static_cast<DType>(dtype))));
  }
  if (dim < 0 || dim > static_cast<int64_t>(TensorHeader::kMaxDims)) {
    return corrupt(format("has a tensor of {} dimensions; at most {} are allowed", dim,
                          TensorHeader::kMaxDims));
  }
  int64_t bytes = static_cast<int64_t>(size_of(static_cast<DType>(dtype)));
  for (const int64_t size : words.subspan(3, static_cast<size_t>(dim))) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes) ||
        bytes > TensorHeader::kMaxBytes) {
      return corrupt(
          format("has a tensor with a size of {}, which is negative or makes it larger "
                 "than {} bytes",
                 size, TensorHeader::kMaxBytes));
    }
    entry.sizes.push_back(size);
  }
  return entry;
}

}  // namespace

Result<TensorHeader> TensorHeader::of(const std::vector<at::Tensor>& tensors) {
  const auto refused = [](const std::string& what) {
    return Error(ErrorCode::kInvalidArgument, format("a stage returned {}", what));
  };
  if (tensors.size() > kMaxTensors) {
    return refused(
        format("{} tensors; between stages at most {} are supported", tensors.size(), kMaxTensors));
  }
  TensorHeader header;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) return refused("an undefined tensor");
    if (!to_dtype(tensor.scalar_type())) {
      return refused(format("a tensor of {}, a dtype that cannot be sent",
                            std::string_view(c10::toString(tensor.scalar_type()))));
    }
    if (tensor.dim() > static_cast<int64_t>(kMaxDims)) {
      return refused(format("a tensor of {} dimensions; between stages at most {} are supported",
                            tensor.dim(), kMaxDims));
    }
    header.tensors.push_back(
        {tensor.scalar_type(), tensor.requires_grad(), tensor.sizes().vec(), !tensor.is_cpu()});
  }
  return header;
}

Result<TensorHeader> TensorHeader::decode(std::span<const int64_t> words) {
  if (words.size() != kWords || words[0] != kMagic) return corrupt("is of another kind");
  if (words[1] < 0 || words[1] > static_cast<int64_t>(kMaxTensors)) {
    return corrupt(format("has {} tensors; at most {} are allowed", words[1], kMaxTensors));
  }
  TensorHeader header;
  for (size_t i = 0; i < static_cast<size_t>(words[1]); ++i) {
    auto entry = decode_entry(words.subspan(2 + i * (3 + kMaxDims), 3 + kMaxDims));
    if (!entry.ok()) return entry.error();
    header.tensors.push_back(std::move(*entry));
  }
  return header;
}

std::vector<int64_t> TensorHeader::encode() const {
  std::vector<int64_t> words(kWords, 0);
  words[0] = kMagic;
  words[1] = static_cast<int64_t>(tensors.size());
  size_t at = 2;
  for (const Entry& entry : tensors) {
    words[at] = static_cast<int64_t>(*to_dtype(entry.dtype));
    words[at + 1] =
        (entry.requires_grad ? kRequiresGrad : 0) | (entry.is_on_device ? kIsOnDevice : 0);
    words[at + 2] = static_cast<int64_t>(entry.sizes.size());
    for (size_t i = 0; i < entry.sizes.size(); ++i) words[at + 3 + i] = entry.sizes[i];
    at += 3 + kMaxDims;
  }
  return words;
}

std::vector<at::Tensor> TensorHeader::allocate(c10::Device device) const {
  std::vector<at::Tensor> result;
  for (const Entry& entry : tensors) {
    const c10::Device place = entry.is_on_device ? device : c10::Device(at::kCPU);
    result.push_back(at::empty(entry.sizes, at::TensorOptions(entry.dtype).device(place)));
  }
  return result;
}

std::string TensorHeader::text() const {
  std::string text;
  for (const Entry& entry : tensors) {
    if (!text.empty()) text += ", ";
    text += format("{} {}{}{}", list_of(entry.sizes), to_string(*to_dtype(entry.dtype)),
                   entry.is_on_device ? " on a device" : "",
                   entry.requires_grad ? " with gradient" : "");
  }
  return text.empty() ? "no tensor" : text;
}

}  // namespace cadre::parallel
