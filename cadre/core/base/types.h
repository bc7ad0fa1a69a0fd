// The small vocabulary of every collective: Rank, DType, ReduceOp, Device and byte spans.
//
// Threads: plain values. Blocking: never. The names are those of c10d; to_string() returns them in
// lower case.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cadre/core/base/export.h"

namespace cadre {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

// A member's number in a group, 0 .. world_size - 1. Converts to and from int, so that
// `world.rank() == 0` reads as in PyTorch; as a parameter type it distinguishes ranks from sizes.
struct Rank {
  int value = 0;

  constexpr Rank() = default;
  constexpr Rank(int rank) : value(rank) {}         // NOLINT: implicit by design
  constexpr operator int() const { return value; }  // NOLINT: implicit by design
};

// The values are part of the formats on the wire and on disk: append new types at the end.
enum class DType : uint8_t {
  kUint8,
  kInt32,
  kInt64,
  kBfloat16,
  kFloat32,
  kFloat64,
  kInt8,
  kInt16,
  kBool,  // one byte: 0 or 1
  kFloat16
};
inline constexpr int kNumDTypes = 10;

// Returns the number of bytes of one element.
constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
    case DType::kInt8:
    case DType::kBool:
      return 1;
    case DType::kInt16:
    case DType::kBfloat16:
    case DType::kFloat16:
      return 2;
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

// The reductions of collectives. collective/reduction_table.h says what each does with each dtype,
// or why it is not supported. AVG is the sum divided by the number of ranks; PREMUL_SUM is the sum
// of each rank's input times that rank's factor. The values are part of the formats on the wire,
// too.
enum class ReduceOp : uint8_t { kSum, kAvg, kMin, kMax, kProduct, kBand, kBor, kBxor, kPremulSum };
inline constexpr int kNumReduceOps = 9;

// The kind of memory that holds the buffers of a collective. kPrivateUse1 is the type of a device
// outside of PyTorch, as PyTorch calls it. Append new types at the end.
enum class DeviceType : uint8_t { kCpu, kCuda, kPrivateUse1 };
inline constexpr int kNumDeviceTypes = 3;

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;  // the device's index among the devices of this type in this process

  friend bool operator==(const Device&, const Device&) = default;
};

enum class OpKind : uint8_t {
  kBroadcast,
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBarrier,
  kSend,
  kRecv,
  kAllocate,  // allocates symmetric memory
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kAllToAllV,      // ranks may send each other blocks of different sizes
  kWaitSignal,     // waits for a signal in symmetric memory
  kAllGatherV,     // the ranks' inputs may have different sizes
  kReduceScatterV  // the ranks' outputs may have different sizes
};
inline constexpr int kNumOpKinds = 16;

CADRE_EXPORT std::string_view to_string(DType dtype);      // "float32"
CADRE_EXPORT std::string_view to_string(ReduceOp op);      // "sum"
CADRE_EXPORT std::string_view to_string(OpKind kind);      // "all_reduce"
CADRE_EXPORT std::string_view to_string(DeviceType type);  // "cpu"
CADRE_EXPORT std::string to_string(const Device& device);  // "cpu", "cuda:1"
CADRE_EXPORT std::optional<DType> parse_dtype(std::string_view text);

}  // namespace cadre
