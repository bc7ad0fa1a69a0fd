#include "cadre/launch/cli/path_options.h"

#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "cadre/core/base/format.h"

namespace cadre::cli {
namespace {

namespace fs = std::filesystem;

Error refuse(const GivenOption& given, std::string_view sentence) {
  return Error(ErrorCode::kInvalidArgument, cadre::format("{}: {}", given.text(), sentence));
}

Error needs_a_value(const GivenOption& given) {
  return Error(ErrorCode::kInvalidArgument, cadre::format("{} needs a value", given.spelling));
}

}  // namespace

Status check_output_file(const GivenOption* given) {
  if (given == nullptr) return {};
  if (given->value.empty()) return needs_a_value(*given);
  const fs::path path = given->value;
  std::error_code unknown;
  if (fs::is_directory(path, unknown) || !path.has_filename()) {
    return refuse(*given, "that is a folder; expected the name of a file");
  }
  if (fs::exists(path, unknown) && !fs::is_regular_file(path, unknown)) {
    return refuse(*given, "that is a pipe, a socket or a device; expected the name of a file");
  }
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  if (!fs::is_directory(folder, unknown)) {
    return refuse(*given,
                  cadre::format("the folder {} does not exist; create it first", folder.string()));
  }
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    return refuse(*given, cadre::format("this user may not create files in {}", folder.string()));
  }
  return {};
}

Status check_output_folder(const GivenOption& given) {
  if (given.value.empty()) return needs_a_value(given);
  std::error_code unknown;
  if (fs::exists(given.value, unknown) && !fs::is_directory(given.value, unknown)) {
    return refuse(given, "that is a file; expected a folder, which is created if it is missing");
  }
  return {};
}

}  // namespace cadre::cli
