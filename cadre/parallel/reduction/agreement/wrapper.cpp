#include "cadre/parallel/reduction/agreement/wrapper.h"

#include "cadre/core/base/format.h"

namespace cadre::reduction {

std::string Wrapper::place() const {
  return format("{}, rank {}", name, rank);
}

std::string Wrapper::place_with_module() const {
  return format("{} of {}, rank {}", name, module, rank);
}

}  // namespace cadre::reduction
