// A log for the program. Each line contains the rank, and by default only rank 0 writes.
//
//   cadre::RankLog log(world, {.component = "train"});
//   log.info("loss 0.31");   // from rank 0: "info 2026-11-21T10:00:00.123Z rank=0 train loss 0.31"
//
// Lines go to the group's log: standard error with level, time and rank, unless
// CommunicatorOptions::log says otherwise. CADRE_LOG sets the lowest level that is written; the
// default is warning.
//
// Threads: any. Blocking: while a line is written; no communication. Lifetime: a value; keeps the
// group. Errors: none. Source: get_logger() of Hugging Face Accelerate.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cadre/core/base/export.h"
#include "cadre/core/base/log.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

enum class LoggingRanks : uint8_t {
  kMain,            // rank 0 of the group
  kMainOfEachNode,  // the lowest rank of the group on each host
  kAll,
};

struct RankLogOptions {
  std::string component = "program";
  LoggingRanks ranks = LoggingRanks::kMain;
};

class CADRE_EXPORT RankLog {
 public:
  explicit RankLog(const ProcessGroup& group, RankLogOptions options = {});

  void debug(std::string_view message) const { write(LogLevel::kDebug, message); }
  void info(std::string_view message) const { write(LogLevel::kInfo, message); }
  void warning(std::string_view message) const { write(LogLevel::kWarning, message); }
  void error(std::string_view message) const { write(LogLevel::kError, message); }
  // message: may have several lines, each of which becomes a line of the log.
  void write(LogLevel level, std::string_view message) const;
  // Returns whether this rank writes.
  bool is_writing() const { return is_writing_; }

 private:
  ProcessGroup group_;
  std::string component_;
  bool is_writing_;
};

}  // namespace cadre
