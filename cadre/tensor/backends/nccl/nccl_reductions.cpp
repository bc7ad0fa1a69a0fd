#include "cadre/tensor/backends/nccl/nccl_reductions.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/mul.h>

#include <bit>
#include <limits>

#include "cadre/tensor/device/core_device.h"
#include "cadre/tensor/device/scalar_type.h"

namespace cadre::nccl {
namespace {

// Returns a tensor on memory of a collective, which the group holds until the end.
at::Tensor tensor_on(const std::byte* data, size_t num_bytes, at::ScalarType type,
                     const Collective& c) {
  const c10::Device device = device::to_c10(c.device);
  const auto numel = static_cast<int64_t>(num_bytes / size_of(c.dtype));
  return at::from_blob(
      const_cast<std::byte*>(data), {numel}, [](void*) {},
      at::TensorOptions().dtype(type).device(device), device);
}

ConstBytes const_bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

Bytes bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

// Adds the reduction that finds the elements with a NaN. REQUIRES: the collective is the last one.
void keep_nan(PreparedCall& call, at::ScalarType type) {
  const Collective& c = call.collectives.back();
  const at::Tensor is_nan = at::isnan(tensor_on(c.in.data(), c.in.size(), type, c)).to(at::kByte);
  const auto num_out = static_cast<int64_t>(c.out.size() / size_of(c.dtype));
  const at::Tensor any_nan = at::empty({num_out}, is_nan.options());
  if (num_out > 0) {
    const at::Tensor out = tensor_on(c.out.data(), c.out.size(), type, c);
    call.finish.emplace_back([out, any_nan] {
      out.masked_fill_(any_nan.to(at::kBool), std::numeric_limits<double>::quiet_NaN());
    });
  }
  Collective flags = c;
  flags.dtype = DType::kUint8;
  flags.reduction = ReduceOp::kMax;
  flags.in = const_bytes_of(is_nan);
  flags.out = num_out > 0 ? bytes_of(any_nan) : Bytes();
  call.memory.push_back(is_nan);
  call.memory.push_back(any_nan);
  call.collectives.push_back(std::move(flags));
}

void divide_after(PreparedCall& call, at::ScalarType type, int world_size) {
  Collective& c = call.collectives.back();
  c.reduction = ReduceOp::kSum;
  if (c.out.empty()) return;
  const at::Tensor out = tensor_on(c.out.data(), c.out.size(), type, c);
  call.finish.emplace_back([out, world_size] { out.div_(world_size); });
}

// The sum of float16 values may overflow where their mean does not, so float32 is summed.
void average_in_float(PreparedCall& call, at::ScalarType type, int world_size) {
  Collective& c = call.collectives.back();
  const at::Tensor in = tensor_on(c.in.data(), c.in.size(), type, c).to(at::kFloat);
  call.memory.push_back(in);
  if (!c.out.empty()) {
    const at::Tensor out = tensor_on(c.out.data(), c.out.size(), type, c);
    const at::Tensor sum = at::empty({out.numel()}, in.options());
    call.memory.push_back(sum);
    c.out = bytes_of(sum);
    call.finish.emplace_back([out, sum, world_size] { out.copy_(sum.div_(world_size)); });
  }
  c.in = const_bytes_of(in);
  c.dtype = DType::kFloat32;
  c.reduction = ReduceOp::kSum;
}

void multiply_before(PreparedCall& call, at::ScalarType type) {
  Collective& c = call.collectives.back();
  const at::Tensor scaled =
      at::mul(tensor_on(c.in.data(), c.in.size(), type, c), *c.reduction.factor());
  c.reduction = ReduceOp::kSum;
  c.in = const_bytes_of(scaled);
  call.memory.push_back(scaled);
}

void adapt_last(PreparedCall& call, int world_size) {
  const Collective& c = call.collectives.back();
  const at::ScalarType type = to_scalar_type(c.dtype);
  if (!c10::isFloatingType(type) || !reduces(c.kind) || c.in.empty()) return;
  const bool is_half = size_of(c.dtype) == 2;
  switch (c.reduction.op()) {
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return keep_nan(call, type);
    case ReduceOp::kAvg:
      if (std::has_single_bit(static_cast<unsigned>(world_size))) return;
      return is_half ? average_in_float(call, type, world_size)
                     : divide_after(call, type, world_size);
    case ReduceOp::kPremulSum:
      if (is_half) multiply_before(call, type);
      return;
    default:
      return;
  }
}

}  // namespace

PreparedCall prepare(std::span<const Collective> collectives, int world_size) {
  PreparedCall call;
  for (const Collective& collective : collectives) {
    call.collectives.push_back(collective);
    adapt_last(call, world_size);
  }
  return call;
}

}  // namespace cadre::nccl
