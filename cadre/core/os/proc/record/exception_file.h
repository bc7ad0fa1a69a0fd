// The text of an exception, and the error file that a launcher reads.
//
// Threads: any. Blocking: for the time of the disk. Errors: those of replace_file() (file.h).
#pragma once

#include <exception>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/wire/error_file.h"

namespace cadre::os {

struct ExceptionText {
  std::string type;  // "cadre::Error"
  std::string what;  // empty for a type without what()
};

// REQUIRES: `exception` is not null.
ExceptionText describe_exception(const std::exception_ptr& exception);

// Returns the content of the error file for this exception: with the exceptions that are nested in
// it (std::throw_with_nested), and the code and the details of a cadre::Error.
ErrorFile exception_file(const std::exception_ptr& exception);

// Writes the file; does nothing if `path` is empty.
Status write_exception(const std::string& path, const std::exception_ptr& exception);

}  // namespace cadre::os
