#include "cadre/core/os/proc/record/record.h"

#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "cadre/core/os/proc/record/crash_handler.h"
#include "cadre/core/os/proc/record/exception_file.h"

namespace cadre {
namespace {

std::string error_file_of_launcher() {
  const char* const path = std::getenv("TORCHELASTIC_ERROR_FILE");
  return path == nullptr ? "" : path;
}

// Prints the message of std::terminate(), and then writes the file for the launcher. The message
// comes first, because writing may fail.
void leave_exception(const std::exception_ptr& exception) {
  const os::ExceptionText text = os::describe_exception(exception);
  std::fprintf(stderr, "terminate called after throwing an instance of '%s'\n", text.type.c_str());
  if (!text.what.empty()) std::fprintf(stderr, "  what():  %s\n", text.what.c_str());
  const Status written = os::write_exception(error_file_of_launcher(), exception);
  if (!written.ok()) {
    std::fprintf(stderr, "cadre: the exception was not stored for the launcher: %s\n",
                 written.error().what());
  }
}

}  // namespace

int record(const std::function<int()>& program) {
  os::install_crash_handlers(error_file_of_launcher());
  try {
    return program();
  } catch (abi::__forced_unwind&) {  // pthread_exit() and cancellation unwind with it
    throw;
  } catch (...) {  // any exception is a failure of the program
    leave_exception(std::current_exception());
    return EXIT_FAILURE;
  }
}

}  // namespace cadre
