// How the equality tests train with DistributedDataParallel.
//
// Threads: train_on_ranks makes one for each rank. Blocking: until all ranks have ended. Errors: a
// rank that fails fails the test.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/testing/torch/wrap_training.h"

namespace cadre::testing {

// On one rank; all ranks call it.
inline Training train_on_rank(const Case& test_case, const std::vector<Tensor>& batches,
                              const ProcessGroup& group, const std::shared_ptr<Model>& module,
                              Fault fault = Fault::kNone) {
  const bool is_even = test_case.batch % group.world_size() == 0;
  const auto element_bytes = static_cast<int64_t>(torch::elementSize(test_case.dtype));
  DistributedDataParallel model{
      module,
      faulty_group(group, fault),
      {.weighting = is_even ? GradientWeighting::kEqual : GradientWeighting::kSamples,
       .bucket_caps = {.first_bytes = 64 * element_bytes, .bytes = 256 * element_bytes}}};
  const Share share = share_of(test_case.batch, group.rank(), group.world_size());
  return train(test_case, *module, batches, [&](const Tensor& batch) {
    const Tensor rows = batch.narrow(0, share.begin, share.size());
    if (!is_even) model.set_num_samples(share.size());
    return module->loss(model(rows), rows);
  });
}

// By rank, on ranks as threads.
inline std::vector<Training> train_on_ranks(const Case& test_case,
                                            const std::vector<Tensor>& batches, uint64_t seed,
                                            int world_size, Fault fault = Fault::kNone) {
  return train_on_ranks(test_case, seed, world_size,
                        [&](const ProcessGroup& group, const std::shared_ptr<Model>& module) {
                          return train_on_rank(test_case, batches, group, module, fault);
                        });
}

}  // namespace cadre::testing
