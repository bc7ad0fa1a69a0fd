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
// - `os::System`, `os::make_native_system()`: the interface, and its implementation by the
//   operating system, of which a program makes one object.
// - `os::Thread`, `os::Waiter`: a named thread, and an object with which a thread waits.
// - `os::HostInfo`: the name and identity of the host and of the process.
//
// Guide: docs/guide/reference/groups-and-messages.md. Design:
// docs/decisions/0001-one-seam-for-waiting.md.
#pragma once

#include "cadre/core/os/system.h"
