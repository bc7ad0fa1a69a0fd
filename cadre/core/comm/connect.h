// Joins the job that the environment describes and connects the group of its ranks. Programs call
// it first.
//
// Threads: call from main, before other threads change the environment. Blocking: until all ranks
// have connected, or the deadline. Lifetime: borrows the System. Errors: cadre::Error, as the
// rendezvous and Communicator::connect say. Without a launcher the group is a world of one.
#pragma once

#include <memory>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/system.h"

namespace cadre {

// Explicit settings for the rank and the job of this process. Fields that are left empty come from
// the environment (core/rendezvous/job_environment.h).
struct JobPlace;

// Connects the group. If `options` do not set a log, the log is standard error. If they set no
// flight record, the record is the file GROUP-roundROUND-rankRANK.flight in the folder that the
// environment names, which is created. If they set no tuning file, it is that of the environment.
CADRE_EXPORT std::unique_ptr<Communicator> connect_from_environment(
    os::System& system, const CommunicatorOptions& options, Deadline deadline);
CADRE_EXPORT std::unique_ptr<Communicator> connect_from_environment(
    os::System& system, const JobPlace& place, const CommunicatorOptions& options,
    Deadline deadline);

}  // namespace cadre
