// Detects that the parameters of a module have changed since it was wrapped. A parameter that was
// added, removed or replaced, or whose dtype, device or shape has changed, would train without
// being reduced or be reduced incorrectly. Also detects writes to parameters while no code may
// write to them.
//
// Threads: as the module. Blocking: never. Lifetime: shares the module and its parameters.
// Errors: none; a change is returned as a sentence. Cost of a check: it looks at each parameter
// and, for a module with children, allocates memory once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace torch::nn {
class Module;
}

namespace cadre::wrap {

class CADRE_EXPORT ParameterWatch {
 public:
  explicit ParameterWatch(std::shared_ptr<const torch::nn::Module> module);

  // Returns the first difference from the parameters at construction, such as "\"fc.bias\" was
  // added"; nullopt if there is none. Changed values and newly frozen parameters do not count.
  std::optional<std::string> change() const;
  // Returns the first parameter that was added, removed or replaced, as a sentence; nullopt if
  // there is none.
  std::optional<std::string> change_of_list() const;

 private:
  struct Known {
    std::string name;
    at::Tensor tensor;
    at::ScalarType dtype;
    at::Device device;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    bool requires_grad;
    std::string text;  // dtype, strides and device for messages
  };

  static std::optional<std::string> change_of(const Known& known);
  bool has_the_same_list() const;

  std::shared_ptr<const torch::nn::Module> module_;
  std::vector<Known> known_;  // the parameters, in the order of named_parameters()
};

// Detects writes to parameters by code other than an optimizer, such as a forward that normalizes
// its weight, or an Embedding with max_norm. It compares version counters and addresses. Writes
// through a raw pointer or at::Tensor::data() change neither; only samples() detects them.
class CADRE_EXPORT WriteWatch {
 public:
  explicit WriteWatch(std::vector<NamedTensor> parameters);

  // Remembers the present version and address of each parameter.
  void begin();
  // Returns the indices in parameters(), ascending, of the parameters that were written to or given
  // other memory since begin().
  std::vector<size_t> written() const;
  // Returns the number of writes to all parameters: the sum of their version counters.
  uint32_t num_writes() const;
  // Returns a digest of the bits of one element of each parameter. It almost certainly changes when
  // an optimizer steps, even if that writes through at::Tensor::data(), as torch::optim::SGD does.
  // Pass a different `turn` in each call to sample other elements. REQUIRES: the parameters have
  // memory.
  uint64_t samples(uint64_t turn = 0) const;

  const std::vector<NamedTensor>& parameters() const { return parameters_; }

 private:
  struct Seen {
    uint32_t version = 0;
    const void* storage = nullptr;
    int64_t offset = 0;

    bool operator==(const Seen&) const = default;
  };
  static Seen now(const at::Tensor& tensor);

  std::vector<NamedTensor> parameters_;
  std::vector<Seen> seen_;  // one entry for each parameter
};

}  // namespace cadre::wrap
