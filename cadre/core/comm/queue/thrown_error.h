// Turns an exception of an operation into the error of that operation, because the threads that run
// operations must not unwind.
//
// Threads: any. Blocking: never. Errors: none; a lack of memory becomes the text "out of memory",
// which needs no allocation.
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
