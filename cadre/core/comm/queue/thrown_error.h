// What an operation threw, as the error of that operation: the threads that run operations must not
// unwind (house rule: across threads errors are values).
//
// Threads: any. Blocking: never. Errors: none; without memory for a sentence the two words "out of
// memory", which need none.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "cadre/core/base/error.h"

namespace cadre {

inline Error error_of(const std::exception& thrown) {
  if (const auto* error = dynamic_cast<const Error*>(&thrown)) return *error;
  if (dynamic_cast<const std::bad_alloc*>(&thrown) != nullptr) {
    return Error(ErrorCode::kUnavailable, "out of memory");
  }
  return Error(ErrorCode::kInternal, std::string("unexpected exception: ") + thrown.what());
}

}  // namespace cadre
