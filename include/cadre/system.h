// The clock, threads, waiting, sockets and shared memory, as all of the core uses them.
//
//   const auto system = cadre::os::make_native_system();
//   const cadre::Deadline deadline = system->deadline_in(std::chrono::seconds(30));
//   const auto thread =
//       system->spawn("worker", [&] { std::printf("%s\n", system->host().name.c_str()); });
//   thread->join();
//   const auto group = cadre::connect_from_environment(*system, {}, deadline);
//
// Declares:
// - `os::System`, `os::make_native_system()`: the interface, and the one of the operating system; a
//   program makes it once.
// - `os::Thread`, `os::Waiter`: a named thread, and what parks one.
// - `os::HostInfo`: the host and the process that it describes.
//
// Guide: docs/guide/reference/groups-and-messages.md. Design:
// docs/decisions/0001-one-seam-for-waiting.md.
#pragma once

#include "cadre/core/os/system.h"
