#include "cadre/testing/core/paths.h"

namespace cadre::testing {

std::string source_path(std::string_view relative) {
  return std::string(CADRE_SOURCE_DIR "/").append(relative);
}

std::string build_path(std::string_view relative) {
  return std::string(CADRE_BINARY_DIR "/").append(relative);
}

}  // namespace cadre::testing
