// What becomes of the tensors that autograd saves for backward while a scope is active. All
// knowledge of how libtorch is asked for this is in saved_tensors.cpp.
//
// Threads: a scope is that of the calling thread; what pack() returned is called in the thread that
// runs the backward. Blocking: as the store. Lifetime: the store outlives the scope, not the graph.
// Errors: what pack() throws leaves the operation that saves, and what the function that it
// returned throws leaves backward(). Source: torch.autograd.graph.saved_tensors_hooks.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "cadre/core/base/export.h"

namespace cadre::wrap {

class CADRE_EXPORT SavedTensorStore {
 public:
  virtual ~SavedTensorStore() = default;

  // Called for each tensor that an operation saves, detached: parameters, too. The result returns a
  // tensor of the same values, dtype, sizes and strides, each time that backward needs it, and is
  // destroyed with the graph. Autograd no longer notices a change in place of a tensor that the
  // store keeps as it is: the store compares versions.
  virtual std::function<at::Tensor()> pack(const at::Tensor& tensor) = 0;
};

// Scopes may be nested: the innermost one counts. The scope ends on the thread that it began on.
class [[nodiscard]] CADRE_EXPORT SavedTensorScope {
 public:
  explicit SavedTensorScope(SavedTensorStore& store);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  SavedTensorStore* outer_;
};

}  // namespace cadre::wrap
