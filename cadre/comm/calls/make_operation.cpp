#include "cadre/comm/calls/make_operation.h"

#include "cadre/base/format.h"
#include "cadre/comm/calls/checks.h"

namespace cadre {
namespace {

PackedShape shape_of(const OpDescriptor& descriptor, std::span<const int64_t> sizes) {
  const PackedShape shape(sizes);
  uint64_t num_elements = 1;
  for (const int64_t size : sizes) num_elements *= static_cast<uint64_t>(size);
  if (num_elements == descriptor.count) return shape;
  refuse_call(
      format("{}: CollectiveOptions::sizes have {} elements, but the buffer that is "
             "compared between ranks has {}",
             descriptor.kind, num_elements, descriptor.count));
}

}  // namespace

void check_factor(const OpDescriptor& descriptor, const CollectiveOptions& options) {
  const bool is_needed = descriptor.reduce_op == ReduceOp::kPremulSum;
  if (is_needed == options.premul_factor.has_value()) return;
  if (is_needed) {
    refuse_call(format("{}: {} needs this rank's factor; set premul_factor beside the operation",
                       descriptor.kind, descriptor.reduce_op));
  }
  refuse_call(
      format("{}: a premul_factor of {} was given, which only {} uses; leave it out or call {}",
             descriptor.kind, *options.premul_factor, ReduceOp::kPremulSum, ReduceOp::kPremulSum));
}

Operation make_operation(const OpDescriptor& descriptor, ConstBytes in, Bytes out,
                         const CollectiveOptions& options) {
  check_factor(descriptor, options);
  Operation operation{.descriptor = descriptor,
                      .in = in,
                      .out = out,
                      .deadline = options.deadline,
                      .keep_alive = options.keep_alive,
                      .premul_factor = options.premul_factor};
  if (options.sizes) operation.descriptor.shape = shape_of(descriptor, *options.sizes);
  return operation;
}

}  // namespace cadre
