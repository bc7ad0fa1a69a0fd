// Tells an observer before and after each operation of libtorch that is given an observed parameter
// or a view of one, wherever the operation is called: in a forward of any module, in a backward, in
// a recomputation of activations, or outside of them. FullyShardedDataParallel gathers the
// parameters of a unit in this way, because C++ modules have no forward hooks.
//
// Observed parameters carry a dispatch key for which libtorch has no kernel and for which this file
// registers one, above autograd and autocast. Views and saved tensors inherit the keys of a tensor,
// results do not. So operations without an observed argument cost nothing, and one with an observed
// argument some 0.3 us more. Views, and operations that are made of others, read no values
// themselves and are not observed; the operations that they call are.
//
// Threads: the observer is called in the thread that calls the operation. Blocking: as the
// observer. Lifetime: ObservedParameters keeps the parameters alive and ends the observation; the
// kernel stays registered until the process ends. Errors: an operation throws what begin_use()
// throws, and is then not run. Not observed: an access to the memory that is no operation, such as
// data_ptr() or torch::save(). Source: out-of-core dispatch keys of PyTorch's torchdistx.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cadre/core/base/export.h"

namespace cadre::wrap {

class CADRE_EXPORT UseObserver {
 public:
  virtual ~UseObserver() = default;
  struct Use {
    size_t number;
    bool is_written;  // the operation writes to the parameter
  };
  // Called before an operation that is given a parameter with this number. An operation that is
  // given several begins their uses in the order of its arguments.
  virtual void begin_use(const Use& use) = 0;
  // Called after the operation has returned or thrown, for each begin_use() that has returned.
  virtual void end_use(const Use& use) noexcept = 0;
};

// Tells the observer of the tensor, if it is observed, of a use by code that writes to its memory
// without an operation. An operation that is given the tensor need not be told.
CADRE_EXPORT void tell_written(const at::Tensor& tensor);

class CADRE_EXPORT ObservedParameters {
 public:
  // number: passed to the observer. The tensors share no storage with parameters that are observed
  // with another number.
  ObservedParameters(std::vector<at::Tensor> parameters, std::weak_ptr<UseObserver> observer,
                     size_t number);
  ~ObservedParameters();
  ObservedParameters(const ObservedParameters&) = delete;
  ObservedParameters& operator=(const ObservedParameters&) = delete;

  // Returns the index of the first parameter that is not observed any more, because set_data() or
  // to() of its module has given it other memory; nullopt if there is none.
  std::optional<size_t> first_lost() const;

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<c10::Storage> storages_;  // kept alive, because the kernel knows them by address
};

}  // namespace cadre::wrap
