// Finds the torch of a Python installation by its files, without importing or linking it.
//
// Threads: any. Blocking: for the time of a look at the file system.
#pragma once

#include <optional>
#include <string>

#include "cadre/base/error.h"
#include "cadre/os/proc/environment.h"

namespace cadre::cli {

struct TorchInstallation {
  std::string folder;   // ".../site-packages/torch"
  std::string version;  // as its version.py says: "2.13.0+cpu"
};

// Looks at CADRE_TORCH (a torch folder, the folder of a virtual environment, or a Python) and
// nowhere else if it is set; then at .venv in the working directory, then python3 of PATH, as the
// build does (cmake/FindLibTorch.cmake), then at what this build found.
std::optional<TorchInstallation> find_torch(const os::Environment& environment);

// LD_LIBRARY_PATH for a trainer that does not know itself where its libtorch is, because that lay
// in the source tree or has gone since: that of find_torch(), if its version fits. nullopt for one
// that knows. kUnavailable, with a sentence that names CADRE_TORCH, when none is found that fits.
// Blocking: while the system's loader looks for the trainer's libraries (milliseconds).
Result<std::optional<std::string>> trainer_library_path(const std::string& trainer,
                                                        const os::Environment& environment);

// "there is none in .venv of this folder nor beside python3", or what CADRE_TORCH names and has
// not; and what to set it to. For a sentence about a torch that find_torch() did not find.
std::string explain_missing_torch(const os::Environment& environment);

// Whether this build had a torch, and so made a trainer.
bool built_with_torch();

// The Python that `cadre run` would use: a path, or the name when it was not found.
std::string find_python(const os::Environment& environment);

}  // namespace cadre::cli
