#include "cadre/core/os/proc/executable.h"

#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>

#include "cadre/core/base/format.h"

namespace cadre::os {
namespace {

namespace fs = std::filesystem;

bool is_executable_file(const fs::path& path) {
  std::error_code failure;
  return fs::is_regular_file(path, failure) && ::access(path.c_str(), X_OK) == 0;
}

// Recognizes a program by its first bytes: those of an ELF file or of a script that names its
// interpreter.
bool looks_like_a_program(const std::string& path) {
  std::array<char, 4> bytes{};
  std::ifstream(path, std::ios::binary).read(bytes.data(), bytes.size());
  const std::string_view begin(bytes.data(), bytes.size());
  return begin ==
             "\x7f"
             "ELF" ||
         begin.starts_with("#!");
}

Result<std::string> check_path(const std::string& path) {
  std::error_code failure;
  if (!fs::exists(path, failure)) {
    return Error(ErrorCode::kUnavailable, cadre::format("\"{}\" does not exist", path));
  }
  if (fs::is_directory(path, failure)) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("\"{}\" is a directory, not a program", path));
  }
  if (!is_executable_file(path)) {
    return Error(
        ErrorCode::kInvalidArgument,
        looks_like_a_program(path)
            ? cadre::format("\"{0}\" is not executable: chmod +x {0}", path)
            : cadre::format("\"{0}\" is not a program: it is not executable, and it begins "
                            "neither as a compiled program does nor with #!; if it is a "
                            "script, name its interpreter before it (sh {0})",
                            path));
  }
  return path;
}

// If the working directory has a file of this name, the error also suggests ./NAME, or says why
// that would fail.
Error not_in_path(const std::string& name) {
  const std::string here = "./" + name;
  std::error_code failure;
  if (!is_executable_file(here) && !fs::is_directory(here, failure) && looks_like_a_program(here)) {
    return Error(ErrorCode::kUnavailable,
                 cadre::format("\"{0}\" is not in PATH, and the file in this folder is not "
                               "executable: chmod +x {0}, then say ./{0}",
                               name));
  }
  const auto checked = check_path(here);
  if (!checked.ok()) return checked.error();
  return Error(
      ErrorCode::kUnavailable,
      cadre::format("\"{0}\" is not in PATH; for the file in this folder say ./{0}", name));
}

}  // namespace

Result<std::string> find_executable(const std::string& name, std::string_view search_path) {
  if (name.find('/') != std::string::npos) return check_path(name);
  while (true) {
    const size_t colon = search_path.find(':');
    const std::string_view folder = search_path.substr(0, colon);
    const fs::path candidate = fs::path(folder.empty() ? "." : folder) / name;
    if (is_executable_file(candidate)) return candidate.string();
    if (colon == std::string_view::npos) break;
    search_path.remove_prefix(colon + 1);
  }
  std::error_code failure;
  if (!name.empty() && fs::exists(name, failure)) return not_in_path(name);
  return Error(ErrorCode::kUnavailable, cadre::format("\"{}\" was not found in PATH", name));
}

Result<std::string> own_executable() {
  std::error_code failure;
  const fs::path path = fs::read_symlink("/proc/self/exe", failure);
  if (failure) {
    return Error(ErrorCode::kUnavailable,
                 cadre::format("cannot read /proc/self/exe: {}", failure.message()));
  }
  return path.string();
}

}  // namespace cadre::os
