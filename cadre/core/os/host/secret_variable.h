// A secret that this process was given in its environment.
//
// Threads: call it first in main: it changes the environment, which no other thread may read
// meanwhile. Blocking: never. Lifetime: the copy lives as long as the process.
// Errors: none; nullopt for a variable that is not set or empty.
#pragma once

#include <optional>
#include <string>

#include "cadre/core/base/export.h"
#include "cadre/core/os/host/secret.h"

namespace cadre::os {

// Returns the variable's value. Sets it to the empty text in the environment, so that processes
// that this one starts do not inherit it, and overwrites it where the kernel put it, so that
// neither /proc/PID/environ nor a core file contains it.
CADRE_EXPORT std::optional<Secret> take_secret_variable(const std::string& name);

}  // namespace cadre::os
