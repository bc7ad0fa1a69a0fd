#include "cadre/core/base/log.h"

namespace cadre {
namespace {

class NullLogSink final : public LogSink {
 public:
  void write(LogLevel, std::string_view, std::string_view) override {}
};

}  // namespace

LogSink& null_log_sink() {
  static NullLogSink sink;  // is shared by all callers, because it has no state
  return sink;
}

}  // namespace cadre
