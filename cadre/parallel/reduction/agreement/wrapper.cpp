#include "cadre/parallel/reduction/agreement/wrapper.h"

#include "cadre/core/base/format.h"

namespace cadre::reduction {

std::string Wrapper::place() const {
  return format("{}, {}", name, rank_text);
}

std::string Wrapper::place_with_module() const {
  return format("{} of {}, {}", name, module, rank_text);
}

}  // namespace cadre::reduction
