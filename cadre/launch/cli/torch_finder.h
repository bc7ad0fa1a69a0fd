// Finds the torch of a Python installation, or of libtorch's ZIP, by its files, without importing
// or linking torch.
//
// Threads: any. Blocking: reads the file system.
#pragma once

#include <optional>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/os/proc/environment.h"

namespace cadre::cli {

struct TorchInstallation {
  std::string folder;   // the folder ".../site-packages/torch", or the folder "libtorch" of the ZIP
  std::string version;  // the version in its version.py or build-version, for example "2.13.0+cpu"
};

// Searches the path in CADRE_TORCH (a torch folder, the folder of a virtual environment, or a
// Python), and no other place if the variable is set; else .venv in the working directory, then the
// python3 of PATH, like the build (cmake/FindLibTorch.cmake), then the torch with which this
// program was built.
std::optional<TorchInstallation> find_torch(const os::Environment& environment);

// Returns the LD_LIBRARY_PATH for a trainer whose own search path does not find libtorch, because
// libtorch was in the source tree or has been removed: the folder of find_torch(), if its version
// matches. Returns nullopt if the trainer finds its libtorch. Returns kUnavailable, with a message
// that names CADRE_TORCH, if no matching version is found. Blocking: while the system's loader
// looks for the trainer's libraries (milliseconds).
Result<std::optional<std::string>> trainer_library_path(const std::string& trainer,
                                                        const os::Environment& environment);

// Returns the end of an error message: why find_torch() found nothing, and how to set CADRE_TORCH.
std::string explain_missing_torch(const os::Environment& environment);

// Returns whether Cadre was built with torch, so that it has a trainer.
bool built_with_torch();

// Returns the Python that `cadre run` would use: a path, or the name if it was not found.
std::string find_python(const os::Environment& environment);

}  // namespace cadre::cli
