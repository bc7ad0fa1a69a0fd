#include "cadre/launch/cli/torch_finder.h"

#include <chrono>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <system_error>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/proc/executable.h"
#include "cadre/core/os/proc/program_output.h"
#include "cadre/core/os/system.h"

namespace cadre::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxVersionFileBytes = 64 << 10;
// The folder and version of the torch with which Cadre was built. The folder is empty if it was
// inside the source tree, which may be removed later.
constexpr std::string_view kBuiltWithFolder = CADRE_LIBTORCH_DIR;
constexpr std::string_view kBuiltWithVersion = CADRE_LIBTORCH_VERSION;
constexpr const char* kDefaultPath = "/usr/local/bin:/usr/bin:/bin";

// Returns the text between the quotes of "__version__ = '2.13.0+cpu'"; empty if there is none.
std::string version_in_python(const std::string& text) {
  // Searches only at the beginning of lines: the first lines of the file list its exported names.
  const size_t name = text.find("\n__version__ ");
  const size_t open = text.find_first_of("'\"", name);
  if (name == std::string::npos || open == std::string::npos) return {};
  const size_t close = text.find(text[open], open + 1);
  if (close == std::string::npos) return {};
  return text.substr(open + 1, close - open - 1);
}

// Reads version.py of a wheel, or build-version of libtorch's ZIP, whose first line is the version.
std::optional<TorchInstallation> read_torch(const fs::path& folder) {
  std::string version;
  if (const auto python = os::read_file(folder / "version.py", kMaxVersionFileBytes); python.ok()) {
    version = version_in_python(*python);
  } else if (const auto plain = os::read_file(folder / "build-version", kMaxVersionFileBytes);
             plain.ok()) {
    version = plain->substr(0, plain->find_first_of("\r\n"));
  }
  if (version.empty()) return std::nullopt;
  return TorchInstallation{.folder = folder.string(), .version = version};
}

// Searches for torch below PREFIX/lib/python3.X: in site-packages, and in dist-packages, which
// Debian uses.
std::optional<TorchInstallation> torch_below(const fs::path& prefix) {
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

// Returns "2.13" of "2.13.0+cpu": libtorch's C++ interface is the same in all patch versions.
std::string_view minor_version(std::string_view version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

// Searches for the torch of a Python: below PREFIX if the Python is PREFIX/bin/python. `name` may
// be given without a folder; then it is searched in PATH.
std::optional<TorchInstallation> torch_of_python(const std::string& name,
                                                 const os::Environment& environment) {
  const auto python = os::find_executable(name, environment.get_or("PATH", kDefaultPath));
  if (!python.ok()) return std::nullopt;
  return torch_below(fs::path(*python).parent_path().parent_path());
}

// Returns whether the dynamic loader finds the program's libtorch. Does not run the program.
bool finds_libtorch(const std::string& program) {
  const auto system = os::make_native_system();
  const auto libraries = os::program_output({"env", "LD_TRACE_LOADED_OBJECTS=1", program},
                                            system->deadline_in(std::chrono::seconds(10)));
  if (!libraries.ok()) return true;  // unknown; the program reports its own error
  std::istringstream lines(*libraries);
  for (std::string line; std::getline(lines, line);) {
    const bool is_torch =
        line.find("libtorch") != std::string::npos || line.find("libc10") != std::string::npos;
    if (is_torch && line.find("not found") != std::string::npos) return false;
  }
  return true;
}

}  // namespace

std::optional<TorchInstallation> find_torch(const os::Environment& environment) {
  if (const std::string named = environment.get_or("CADRE_TORCH", ""); !named.empty()) {
    std::error_code failure;
    if (!fs::is_directory(named, failure)) return torch_of_python(named, environment);
    if (auto torch = read_torch(named)) return torch;
    return torch_below(named);
  }
  // current_path() fails if the working directory was removed.
  std::error_code failure;
  const fs::path here = fs::current_path(failure);
  if (!failure) {
    if (auto torch = torch_below(here / ".venv")) return torch;
  }
  if (auto torch = torch_of_python("python3", environment)) return torch;
  if (kBuiltWithFolder.empty()) return std::nullopt;
  return read_torch(kBuiltWithFolder);
}

Result<std::optional<std::string>> trainer_library_path(const std::string& trainer,
                                                        const os::Environment& environment) {
  if (finds_libtorch(trainer)) return std::optional<std::string>();
  const std::string_view wanted = minor_version(kBuiltWithVersion);
  const auto torch = find_torch(environment);
  if (torch && minor_version(torch->version) == wanted) {
    const std::string inherited = environment.get_or("LD_LIBRARY_PATH", "");
    return std::optional(torch->folder + "/lib" + (inherited.empty() ? "" : ":" + inherited));
  }
  // `wanted`, the version of the build's torch, is empty if Cadre was built without torch.
  const std::string needed = wanted.empty() ? "torch" : cadre::format("torch {}", wanted);
  const std::string found = torch ? cadre::format(
                                        "{} has torch {}; set CADRE_TORCH to a torch "
                                        "folder, a virtual environment or a Python that "
                                        "has {}",
                                        torch->folder, torch->version, needed)
                                  : explain_missing_torch(environment);
  return Error(ErrorCode::kUnavailable,
               cadre::format("the trainer needs the libraries of {}, and {}", needed, found));
}

std::string explain_missing_torch(const os::Environment& environment) {
  const std::string named = environment.get_or("CADRE_TORCH", "");
  const std::string_view wanted = minor_version(kBuiltWithVersion);
  return cadre::format(
      "{}; set CADRE_TORCH to a torch folder, a virtual environment or a Python "
      "that has torch{}{}",
      named.empty() ? "there is no torch in .venv of the working directory or beside python3"
                    : cadre::format("CADRE_TORCH={} has no torch", named),
      wanted.empty() ? "" : " ", wanted);
}

bool built_with_torch() {
  return !kBuiltWithVersion.empty();
}

std::string find_python(const os::Environment& environment) {
  const std::string name = environment.get_or("PYTHON_EXEC", "python3");
  const auto found = os::find_executable(name, environment.get_or("PATH", kDefaultPath));
  return found.ok() ? *found : name + " (not found)";
}

}  // namespace cadre::cli
