#include "cadre/cli/torch_finder.h"

#include <filesystem>
#include <string_view>
#include <system_error>

#include "cadre/os/io/file.h"
#include "cadre/os/proc/executable.h"

namespace cadre::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxVersionFileBytes = 64 << 10;
// What this build found; no folder when it lay in the source tree, which may go.
constexpr std::string_view kBuiltWithFolder = CADRE_LIBTORCH_DIR;
constexpr std::string_view kBuiltWithVersion = CADRE_LIBTORCH_VERSION;
constexpr const char* kDefaultPath = "/usr/local/bin:/usr/bin:/bin";

// The text between the quotes of "__version__ = '2.13.0+cpu'".
std::optional<TorchInstallation> read_torch(const fs::path& folder) {
  const auto content = os::read_file(folder / "version.py", kMaxVersionFileBytes);
  if (!content.ok()) return std::nullopt;
  // At a line's beginning: the file's first lines list the names it exports.
  const size_t name = content->find("\n__version__ ");
  const size_t open = content->find_first_of("'\"", name);
  if (name == std::string::npos || open == std::string::npos) return std::nullopt;
  const size_t close = content->find((*content)[open], open + 1);
  if (close == std::string::npos) return std::nullopt;
  return TorchInstallation{.folder = folder.string(),
                           .version = content->substr(open + 1, close - open - 1)};
}

// Below PREFIX/lib/python3.X of PREFIX/bin/python: site-packages, or Debian's dist-packages.
std::optional<TorchInstallation> torch_of_python(const fs::path& python) {
  const fs::path prefix = python.parent_path().parent_path();
  for (const char* libraries : {"lib", "local/lib"}) {
    std::error_code failure;
    for (fs::directory_iterator entry(prefix / libraries, failure), end; !failure && entry != end;
         entry.increment(failure)) {
      if (!entry->path().filename().string().starts_with("python3")) continue;
      for (const char* packages : {"site-packages", "dist-packages"}) {
        if (auto torch = read_torch(entry->path() / packages / "torch")) return torch;
      }
    }
  }
  return std::nullopt;
}

// "2.13" of "2.13.0+cpu": libtorch's C++ interface is the same within it.
std::string_view minor_version(std::string_view version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

}  // namespace

std::optional<TorchInstallation> find_torch(const os::Environment& environment) {
  if (const auto named = environment.get("CADRE_TORCH"); named && !named->empty()) {
    std::error_code failure;
    if (fs::is_directory(*named, failure)) return read_torch(*named);
    return torch_of_python(*named);
  }
  if (auto torch = torch_of_python(fs::absolute(".venv/bin/python"))) return torch;
  const auto python = os::find_executable("python3", environment.get_or("PATH", kDefaultPath));
  if (python.ok()) {
    if (auto torch = torch_of_python(*python)) return torch;
  }
  if (kBuiltWithFolder.empty()) return std::nullopt;
  return read_torch(kBuiltWithFolder);
}

std::optional<std::string> trainer_library_path(const os::Environment& environment) {
  std::error_code failure;
  if (!kBuiltWithFolder.empty() && fs::exists(kBuiltWithFolder, failure)) return std::nullopt;
  const auto torch = find_torch(environment);
  if (!torch || minor_version(torch->version) != minor_version(kBuiltWithVersion)) {
    return std::nullopt;
  }
  const std::string inherited = environment.get_or("LD_LIBRARY_PATH", "");
  return torch->folder + "/lib" + (inherited.empty() ? "" : ":" + inherited);
}

std::string find_python(const os::Environment& environment) {
  const std::string name = environment.get_or("PYTHON_EXEC", "python3");
  const auto found = os::find_executable(name, environment.get_or("PATH", kDefaultPath));
  return found.ok() ? *found : name + " (not found)";
}

}  // namespace cadre::cli
