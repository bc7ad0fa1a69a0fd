// Reports the failure of a job to the program that started the launcher: a launcher that is itself
// a worker of torchrun or of another `cadre run` writes to its TORCHELASTIC_ERROR_FILE.
//
// Threads: any. Blocking: reads and writes files. Errors: kUnavailable with the path and the
// system's reason. Source: torch.distributed.elastic's ErrorHandler.dump_error_file and
// ProcessFailure, which reads the file.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/launch/job/worker_group.h"

namespace cadre::launch {

// A worker's error file is read up to this size.
inline constexpr size_t kMaxErrorFileBytes = 1 << 20;

struct JobFailure {
  WorkerExit first;
  std::string host;
  int num_workers = 1;
  std::string worker_file;  // the file that the worker's TORCHELASTIC_ERROR_FILE names
  std::deque<std::string> last_lines;
  int64_t timestamp_s = 0;  // the time in seconds since 1970
};

// Returns one sentence: which rank failed how and where, and its exception if it left one.
std::string sentence_of(const JobFailure& failure);

// Writes {"message": {"message": ..., "errorCode": ..., "extraInfo": {"timestamp": ...}}}. If the
// worker has written an error file, copies it and adds the error code. Otherwise the message is the
// exit status, and the worker's last lines of output replace the traceback.
Status write_error_file(const std::string& path, const JobFailure& failure);

}  // namespace cadre::launch
