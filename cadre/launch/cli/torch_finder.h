// Finds the torch of a Python installation by its files, without importing or linking it.
//
// Threads: any. Blocking: reads the file system.
#pragma once

#include <optional>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/os/proc/environment.h"

namespace cadre::cli {

struct TorchInstallation {
  std::string folder;   // ".../site-packages/torch"
  std::string version;  // as its version.py says: "2.13.0+cpu"
};

// Looks at CADRE_TORCH (a torch folder, the folder of a virtual environment, or a Python) and
// nowhere else if it is set; then at .venv in the working directory, then at python3 of PATH, as
// the build does (cmake/FindLibTorch.cmake), then at the torch with which this program was built.
std::optional<TorchInstallation> find_torch(const os::Environment& environment);

// The LD_LIBRARY_PATH for a trainer whose own search path does not find libtorch, because libtorch
// was in the source tree or has been removed: that of find_torch(), if its version matches. nullopt
// for a trainer that finds its libtorch. kUnavailable, with a sentence that names CADRE_TORCH, if
// no matching version is found. Blocking: while the system's loader looks for the trainer's
// libraries (milliseconds).
Result<std::optional<std::string>> trainer_library_path(const std::string& trainer,
                                                        const os::Environment& environment);

// Why find_torch() found nothing, and how to set CADRE_TORCH: the end of an error message.
std::string explain_missing_torch(const os::Environment& environment);

// Whether Cadre was built with torch, and so has a trainer.
bool built_with_torch();

// The Python that `cadre run` would use: a path, or the name if it was not found.
std::string find_python(const os::Environment& environment);

}  // namespace cadre::cli
