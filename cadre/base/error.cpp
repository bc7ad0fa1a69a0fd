#include "cadre/base/error.h"

namespace cadre {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "kInvalidArgument";
    case ErrorCode::kTimeout:
      return "kTimeout";
    case ErrorCode::kPeerLost:
      return "kPeerLost";
    case ErrorCode::kAborted:
      return "kAborted";
    case ErrorCode::kUnavailable:
      return "kUnavailable";
    case ErrorCode::kCorruption:
      return "kCorruption";
    case ErrorCode::kInternal:
      return "kInternal";
  }
  return "unknown code";
}

Error::Error(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}

Error Error::with_context(std::string_view context) const {
  return Error(code_, std::string(context) + ": " + message_);
}

}  // namespace cadre
