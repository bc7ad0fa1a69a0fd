#include "cadre/core/os/io/errno_error.h"

#include <system_error>

#include "cadre/core/base/format.h"

namespace cadre::os {

Error errno_error(ErrorCode code, std::string_view what, int error_number) {
  return Error(code, cadre::format("{}: {} (errno {})", what,
                                   std::generic_category().message(error_number), error_number));
}

}  // namespace cadre::os
