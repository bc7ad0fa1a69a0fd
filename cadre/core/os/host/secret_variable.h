// A secret that this process was given in its environment.
//
// Threads: any, but like all that changes the environment not beside threads that read it: call it
// first in main. Blocking: never. Lifetime: the copy lives as long as the process.
// Errors: none; nullopt for a variable that is not set or empty.
#pragma once

#include <optional>
#include <string>

#include "cadre/core/base/export.h"
#include "cadre/core/os/host/secret.h"

namespace cadre::os {

// The variable's value. It is emptied in the environment, so that processes which this one starts
// do not inherit it, and overwritten where the kernel put it, so that neither /proc/PID/environ nor
// a core file has it.
CADRE_EXPORT std::optional<Secret> take_secret_variable(const std::string& name);

}  // namespace cadre::os
