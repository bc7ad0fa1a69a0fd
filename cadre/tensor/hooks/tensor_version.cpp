#include "cadre/tensor/hooks/tensor_version.h"

#include <c10/core/InferenceMode.h>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::wrap {

void refuse_inference_mode(std::string_view what) {
  if (!c10::InferenceMode::is_enabled()) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: it is constructed in inference mode, whose tensors cannot be trained; "
                     "construct it outside of c10::InferenceMode",
                     what));
}

void refuse_inference_tensors(std::string_view what, std::span<const NamedTensor> tensors) {
  for (const NamedTensor& named : tensors) {
    if (!named.tensor.defined() || !named.tensor.is_inference()) continue;
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: \"{}\" was made in inference mode and cannot be trained; construct the "
                       "module outside of c10::InferenceMode",
                       what, named.name));
  }
}

}  // namespace cadre::wrap
