// The events of a job as lines of JSON, in the format of torchelastic's events, for tools that
// follow jobs.
//
// Threads: one owner. Blocking: for the time of the disk. Lifetime: the log and the output outlive
// the JobEvents. Source: torch.distributed.elastic.events and SimpleElasticAgent._construct_event.
// docs/guide/running/launching.md lists the states.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/os/system.h"
#include "cadre/launch/job/output/buffered_output.h"
#include "cadre/launch/job/output/log_file.h"
#include "cadre/launch/job/worker_environment.h"
#include "cadre/launch/job/worker_group.h"

namespace cadre::launch {

// Where the events of a job are written. Both may be set.
struct EventTargets {
  bool has_console = false;  // the launcher's standard error
  std::string file;          // a file that is created or replaced; empty: none

  bool is_empty() const { return !has_console && file.empty(); }
};

// One event. The members without a value are null in the JSON.
struct JobEvent {
  std::string state;  // torchelastic's: "RENDEZVOUS", "START", "SUCCEEDED", "FAILED" ...
  std::optional<Rank> rank = {};  // set if the source is a worker, not the launcher
  std::optional<int> pid = {};
  std::optional<int> exit_code = {};
  std::optional<Duration> duration = {};
  std::string error = {};  // the content of the worker's error file
};

// Returns the event for the end of a worker. A worker that the launcher has stopped is TERMINATED.
JobEvent end_of_worker(const WorkerExit& ended, const std::string& error_file);

// Values that all events of a job share.
struct EventContext {
  const JobIdentity& job;
  std::string host;
  std::string entry_point;    // the program
  int64_t timestamp_ms = 0;   // the time since 1970
  Duration total_run_time{};  // since the start of the job
};

// Returns one line without its newline.
std::string to_json(const JobEvent& event, const EventContext& context);

class JobEvents {
 public:
  static Result<std::unique_ptr<JobEvents>> open(const EventTargets& targets,
                                                 BufferedOutput& console);
  JobEvents(bool has_console, std::optional<LogFile> file, BufferedOutput& console)
      : has_console_(has_console), file_(std::move(file)), console_(console) {}

  void write(const JobEvent& event, const EventContext& context);
  // Returns the failure of a write to the file, once.
  std::optional<Error> take_failure();
  bool has_failed() const { return file_ && file_->failure(); }

 private:
  const bool has_console_;
  std::optional<LogFile> file_;
  BufferedOutput& console_;
  bool has_taken_failure_ = false;
};

}  // namespace cadre::launch
