#include "cadre/core/base/types.h"

#include <array>

namespace cadre {
namespace {

constexpr std::array<std::string_view, kNumDTypes> kDTypeNames = {
    "uint8",   "int32", "int64", "bfloat16", "float32",
    "float64", "int8",  "int16", "bool",     "float16"};
constexpr std::array<std::string_view, kNumReduceOps> kReduceOpNames = {
    "sum", "avg", "min", "max", "product", "band", "bor", "bxor", "premul_sum"};
constexpr std::array<std::string_view, kNumOpKinds> kOpKindNames = {
    "broadcast",    "all_reduce",  "all_gather",   "reduce_scatter",
    "barrier",      "send",        "recv",         "allocate_symmetric",
    "reduce",       "gather",      "scatter",      "all_to_all",
    "all_to_all_v", "wait_signal", "all_gather_v", "reduce_scatter_v"};
constexpr std::array<std::string_view, kNumDeviceTypes> kDeviceTypeNames = {"cpu", "cuda",
                                                                            "privateuseone"};

// Values may come from the wire, so the index is checked.
template <typename Enum, size_t kCount>
std::string_view name_of(const std::array<std::string_view, kCount>& names, Enum value) {
  const auto index = static_cast<size_t>(value);
  return index < kCount ? names[index] : std::string_view("unknown");
}

}  // namespace

std::string_view to_string(DType dtype) {
  return name_of(kDTypeNames, dtype);
}
std::string_view to_string(ReduceOp op) {
  return name_of(kReduceOpNames, op);
}
std::string_view to_string(OpKind kind) {
  return name_of(kOpKindNames, kind);
}
std::string_view to_string(DeviceType type) {
  return name_of(kDeviceTypeNames, type);
}
std::string to_string(const Device& device) {
  const std::string type(to_string(device.type));
  return device.type == DeviceType::kCpu ? type : type + ":" + std::to_string(device.index);
}

std::optional<DType> parse_dtype(std::string_view text) {
  for (size_t i = 0; i < kDTypeNames.size(); ++i) {
    if (kDTypeNames[i] == text) return static_cast<DType>(i);
  }
  return std::nullopt;
}

}  // namespace cadre
