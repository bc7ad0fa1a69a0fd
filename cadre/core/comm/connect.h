// Joins the job that the environment describes and connects its group: the first line of a program.
//
// Threads: call from main, before other threads change the environment. Blocking: until all ranks
// are there, or the deadline. Lifetime: borrows the System. Errors: cadre::Error, as the rendezvous
// and Communicator::connect say. Without a launcher the group is a world of one.
#pragma once

#include <memory>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/system.h"

namespace cadre {

// What a program itself says about its place in the job. Fields that it leaves out come from the
// environment (core/rendezvous/job_environment.h).
struct JobPlace;

// If `options` do not set them, the log is standard error, and the flight record is the file
// GROUP-roundROUND-rankRANK.flight in the folder that the environment names. The folder is created.
CADRE_EXPORT std::unique_ptr<Communicator> connect_from_environment(
    os::System& system, const CommunicatorOptions& options, Deadline deadline);
CADRE_EXPORT std::unique_ptr<Communicator> connect_from_environment(
    os::System& system, const JobPlace& place, const CommunicatorOptions& options,
    Deadline deadline);

}  // namespace cadre
