#include "cadre/core/base/error.h"

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
  return Error(code_, std::string(context) + ": " + message_).with_details(details_);
}

Error Error::with_details(ErrorDetails details) const {
  Error error = *this;
  error.details_ = std::move(details);
  return error;
}

Error Error::with_culprit(Rank culprit) const {
  Error error = *this;
  if (!error.details_.culprit) error.details_.culprit = culprit;
  return error;
}

Error Error::with_reporter(Rank reporter) const {
  Error error = *this;
  if (!error.details_.reporter) error.details_.reporter = reporter;
  return error;
}

}  // namespace cadre
