// Joins the job that the environment describes and connects its group: the first line of a program.
//
// Threads: call from main, before other threads change the environment. Blocking: until all ranks
// are there, or the deadline. Lifetime: borrows the System. Errors: cadre::Error, as the rendezvous
// and Communicator::connect say. Without a launcher: a world of one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "cadre/base/deadline.h"
#include "cadre/base/export.h"
#include "cadre/comm/communicator.h"
#include "cadre/os/system.h"
#include "cadre/rendezvous/job_environment.h"

namespace cadre {

// FOLDER/GROUP-roundROUND-rankRANK.flight, or empty where the environment names no folder.
CADRE_EXPORT std::string flight_record_path(const JobEnvironment& environment,
                                            std::string_view group, uint64_t round);

// Where `options` leave them open, the log is standard error and the flight record's file lies in
// the folder that the environment names.
CADRE_EXPORT std::unique_ptr<Communicator> connect_from_environment(
    os::System& system, const CommunicatorOptions& options, Deadline deadline);

}  // namespace cadre
