// Runs replicas at the same time, each in a thread.
//
// Threads: a thread for each replica except the first, which runs in the calling thread. Each has
// the calling thread's grad mode, autocast settings and other state of libtorch, and the stream
// that is current on its device in the calling thread. Blocking: until all have returned. Lifetime:
// no thread is left. Errors: of the replicas that have thrown, the error of the first one, with its
// number and device. Source: torch.nn.parallel.parallel_apply.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cadre/core/base/export.h"

namespace cadre::data_parallel {

// Calls body(i) for each device i. On the CPU each replica computes with its share of the threads
// of the calling thread, and draws random numbers from a generator of its own (dropout). The seeds
// of the generators come from a number that the first draw takes from libtorch's default generator,
// so torch::manual_seed() determines all draws. With one device, body(0) is only called.
CADRE_EXPORT void run_replicas(std::span<const c10::Device> devices,
                               const std::function<void(size_t replica)>& body);

// Returns modules[i]->forward(inputs[i]) for each i, computed at the same time.
template <typename M>
std::vector<at::Tensor> parallel_apply(std::span<const std::shared_ptr<M>> modules,
                                       std::span<const at::Tensor> inputs) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& input : inputs) devices.push_back(input.device());
  std::vector<at::Tensor> outputs(inputs.size());
  run_replicas(devices, [&](size_t i) { outputs[i] = modules[i]->forward(inputs[i]); });
  return outputs;
}

}  // namespace cadre::data_parallel
