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

// The largest number of bytes that are read of a worker's file.
inline constexpr size_t kMaxErrorFileBytes = 1 << 20;

struct JobFailure {
  WorkerExit first;
  std::string host;
  int num_workers = 1;
  std::string worker_file;  // the file that the worker's TORCHELASTIC_ERROR_FILE names
  std::deque<std::string> last_lines;
  int64_t timestamp_s = 0;  // the time in seconds since 1970
};

// Writes {"message": {"message": ..., "errorCode": ..., "extraInfo": {"timestamp": ...}}}. If the
// worker has a file of its own, writes that with the error code added; otherwise the exit status,
// with the last lines of output in place of the traceback.
Status write_error_file(const std::string& path, const JobFailure& failure);

}  // namespace cadre::launch
