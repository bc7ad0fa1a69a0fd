// Whether the ranks of an attempt have saved a step and left because a scheduler ends the job
// (cadre::Preemption), and the line about it.
//
// Threads: any. Blocking: reads small files. Errors: none; a file that cannot be read counts as
// absent.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "cadre/core/wire/preemption_file.h"
#include "cadre/launch/job/worker_group.h"

namespace cadre::launch {

// Reads what a worker with this error file has left. Returns nullopt if it has left nothing.
std::optional<PreemptionFile> read_preemption_file(const std::string& error_file);

// What is known of one worker when its attempt is over.
struct LeavingWorker {
  WorkerExit exit;
  // The worker has received the signal and asked whether it must leave.
  bool has_asked = false;
  bool has_ended = true;  // false for a worker that could not be killed
};

struct PreemptionReport {
  // The signal that the launcher received; 0 if only workers received one.
  int signal = 0;
  std::span<const LeavingWorker> workers;

  // Returns whether a worker has asked or saved, unless all have ended successfully.
  bool has_begun() const;
  // Returns the file of the first worker if all have saved the same step and left; otherwise
  // nullopt.
  std::optional<PreemptionFile> saved_by_all() const;
  // Returns one line. REQUIRES: has_begun().
  std::string to_text() const;
};

}  // namespace cadre::launch
