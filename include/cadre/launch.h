// What a program tells the launcher that has started it.
//
//   int main() {
//     cadre::prepare_restart();  // before the program starts threads
//     const auto system = cadre::os::make_native_system();
//     const auto group = cadre::connect_from_environment(
//         *system, {}, system->deadline_in(cadre::kDefaultConnectTimeout));
//   }
//
// Declares:
// - `prepare_restart()`: prepares for fast restarts: the launcher then forks the program.
//
// Guide: docs/guide/running/launching.md#restarts.
#pragma once

#include "cadre/core/os/proc/fork/prepare_restart.h"
