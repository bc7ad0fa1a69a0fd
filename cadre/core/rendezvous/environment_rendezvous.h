// Joins the job that a launcher described in environment variables, or that the program described
// by a JobPlace.
//
// If there is no launcher, the result is a world of one with no store. Threads, blocking, lifetime
// and errors: rendezvous.h. Source: torch/distributed/rendezvous.py, "env://".
#pragma once

#include "cadre/core/base/log.h"
#include "cadre/core/rendezvous/job_environment.h"
#include "cadre/core/rendezvous/rendezvous.h"

namespace cadre {

class CADRE_EXPORT EnvironmentRendezvous final : public Rendezvous {
 public:
  EnvironmentRendezvous(os::System& system, JobEnvironment environment, LogSink* log = nullptr)
      : system_(system), environment_(std::move(environment)), log_(log) {}

  Result<Membership> join(Deadline deadline) override;

 private:
  os::System& system_;
  const JobEnvironment environment_;
  LogSink* log_;
};

}  // namespace cadre
