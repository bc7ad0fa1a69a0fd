// The operators that autocast runs in a lower precision or in float32 on the late device, as it
// does on CUDA: those that tests use.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <memory>

#include "cadre/testing/torch/late_device/runtime.h"

namespace cadre::testing::late {

void register_autocast() {
  // libtorch calls the kernels until the process ends.
  torch::Library& all =
      *std::make_unique<torch::Library>(MAKE_TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1)).release();
  all.fallback(torch::CppFunction::makeFallthrough());
  torch::Library& m =
      *std::make_unique<torch::Library>(MAKE_TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1))
           .release();
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

}  // namespace cadre::testing::late
