#include "cadre/core/os/host/stderr_log.h"

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <memory>

#include "cadre/core/base/format.h"

namespace cadre::os {
namespace {

spdlog::level::level_enum level_of(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      break;
  }
  return spdlog::level::off;
}

}  // namespace

class StderrLog::Impl {
 public:
  Impl(LogLevel level, Rank rank)
      : logger_("cadre", std::make_shared<spdlog::sinks::stderr_sink_mt>()) {
    logger_.set_level(level_of(level));
    // The pattern is the format of wall_clock_text(), so that the launcher's lines sort among the
    // workers'.
    logger_.set_pattern(cadre::format("%l %Y-%m-%dT%H:%M:%S.%eZ rank={} %v", rank),
                        spdlog::pattern_time_type::utc);
  }

  spdlog::logger& logger() { return logger_; }

 private:
  spdlog::logger logger_;  // is not in the global registry of the logging library
};

StderrLog::StderrLog(LogLevel level, Rank rank) : impl_(std::make_unique<Impl>(level, rank)) {}

StderrLog::~StderrLog() = default;

void StderrLog::write(LogLevel level, std::string_view component, std::string_view message) {
  if (!impl_->logger().should_log(level_of(level))) return;
  impl_->logger().log(level_of(level), "{} {}", component, message);
}

}  // namespace cadre::os
