// The log files of one job on this host, in torchrun's layout:
//
//   FOLDER/RUNID_xxxxxx/attempt_0/0/stdout.log, stderr.log, error.json   for each local rank
//   FOLDER/RUNID_xxxxxx/attempt_0/filtered_stdout.log, filtered_stderr.log
//
// Threads: one owner. Blocking: while the file system works. Lifetime: a JobLogs outlives the
// workers' output that writes to its files; begin_attempt() closes the files of the previous
// attempt. Errors: kUnavailable with the path and the system's reason if a folder or file cannot be
// created. A write that fails is reported by failures() and does not stop the job.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/os/files/native_file_system.h"
#include "cadre/launch/job/output/log_file.h"
#include "cadre/launch/job/output/log_spec.h"

namespace cadre::launch {

// The outputs to which WorkerOutput passes one stream. A null pointer means that there is no file
// or no filter.
struct StreamTargets {
  bool is_shown = true;
  LogFile* file = nullptr;
  const LineFilter* filter = nullptr;

  bool is_default() const { return is_shown && file == nullptr && filter == nullptr; }
};

class JobLogs {
 public:
  // Creates the folder of the job. `run_id` is the name of the job, in which characters that are
  // not allowed in a file name are replaced by "_". `temporary` is the folder for temporary files.
  static Result<std::unique_ptr<JobLogs>> make(const LogSpec& spec, const std::string& run_id,
                                               const std::string& temporary);
  JobLogs(LogSpec spec, std::string folder);

  const std::string& folder() const { return folder_; }
  std::string rank_folder(int attempt, int local_rank) const;
  // Creates the folders and files of an attempt. After an error all streams of the attempt are
  // shown, because none is written to a file.
  Status begin_attempt(int attempt, int num_workers);
  StreamTargets targets(Stream stream, int local_rank);
  // Returns the failures of writes since the last call.
  std::vector<Error> take_failures();
  bool has_failed() const { return has_failed_; }

 private:
  // The log file of each stream of one worker; null if the stream is not written to a file.
  struct RankFiles {
    LogFile* output = nullptr;
    LogFile* error = nullptr;
  };

  Status open_files(int attempt, int num_workers);
  Result<LogFile*> create(const std::string& path);

  const LogSpec spec_;
  const std::string folder_;
  os::NativeFileSystem file_system_;
  std::deque<LogFile> files_;  // belong to the current attempt; their addresses stay valid
  std::vector<RankFiles> files_of_;
  std::optional<LineFilter> output_filter_;
  std::optional<LineFilter> error_filter_;
  std::vector<const LogFile*> reported_;
  bool has_failed_ = false;
};

}  // namespace cadre::launch
