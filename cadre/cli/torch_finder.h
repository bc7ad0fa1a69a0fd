// Finds the torch of a Python installation by its files, without importing or linking it.
//
// Threads: any. Blocking: for the time of a look at the file system.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cadre/os/proc/environment.h"

namespace cadre::cli {

struct TorchInstallation {
  std::string folder;   // ".../site-packages/torch"
  std::string version;  // as its version.py says: "2.13.0+cpu"
};

// Looks at CADRE_TORCH (a torch folder, or a Python), then .venv in the working directory, then
// python3 of PATH, as the build does (cmake/FindLibTorch.cmake), then what this build found.
std::optional<TorchInstallation> find_torch(const os::Environment& environment);

// LD_LIBRARY_PATH for an installed trainer that does not know itself where its torch is, because
// that lay in the source tree or has gone since: the one that find_torch() finds, if its version
// fits.
std::optional<std::string> trainer_library_path(const os::Environment& environment);

// The Python that `cadre run` would use: a path, or the name when it was not found.
std::string find_python(const os::Environment& environment);

}  // namespace cadre::cli
