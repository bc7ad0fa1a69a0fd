// Runs a call of the table of collectives (tests/conformance/collectives.h) in memory of the device
// of a group.
//
// Threads: that of the rank. Blocking: until the result is on the CPU. Errors: those of the group.
#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <cstring>
#include <memory>

#include "cadre/core/comm/communicator.h"
#include "cadre/tensor/device/core_device.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/tensor/device/stream_point.h"
#include "cadre/testing/core/collective_call.h"

namespace cadre::testing {

inline at::Tensor on_cpu(ConstBytes bytes) {
  at::Tensor copy = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(copy.mutable_data_ptr(), bytes.data(), bytes.size());
  return copy;
}

inline Bytes bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

// The input is written and the result is read by kernels, on two streams. So a collective that is
// not ordered behind the first ones, or before the last ones, moves other bytes.
inline void run_on_device(Communicator& group, const CollectiveCall& call, ConstBytes in,
                          Bytes out) {
  const c10::Device device = device::to_c10(*group.device());
  const at::Tensor input = on_cpu(in).to(device).clone();
  const at::Tensor output = on_cpu(out).to(device).clone();
  Collective collective = call.collective(group.rank(), bytes_of(input), bytes_of(output));
  collective.device = *group.device();
  collective.after =
      std::make_shared<const device::StreamPoint>(device::StreamPoint::on_current_stream(device));
  const Work work = group.issue(std::move(collective));
  const device::DeviceRuntime runtime = *device::find_devices(device.type()).runtime;
  const c10::StreamGuard guard(runtime.pooled_stream(device, device::StreamPriority::kNormal));
  work.wait();
  const at::Tensor result = output.clone().cpu();
  if (!out.empty()) std::memcpy(out.data(), result.const_data_ptr(), out.size());
}

}  // namespace cadre::testing
