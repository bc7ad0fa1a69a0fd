#include "cadre/core/os/proc/record/exception_file.h"

#include <cxxabi.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <span>
#include <typeinfo>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/host/wall_clock.h"

namespace cadre::os {
namespace {

constexpr size_t kMaxNested = 8;
constexpr size_t kMaxTextBytes = 128 << 10;  // a longer text is cut

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(name, nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : name;
}

std::string one_text(const ExceptionText& text) {
  const std::string whole = text.what.empty() ? text.type : text.type + ": " + text.what;
  return whole.substr(0, kMaxTextBytes);
}

std::exception_ptr nested_in(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const std::nested_exception& outer) {
    return outer.nested_ptr();
  } catch (...) {  // the exception has no nested one
    return nullptr;
  }
}

void add_details(const Error& error, ErrorFile& file) {
  const ErrorDetails& details = error.details();
  file.details["code"] = std::string(to_string(error.code()));
  if (!details.group.empty()) file.details["group"] = details.group;
  if (!details.operation.empty()) file.details["operation"] = details.operation;
  if (details.operation_number) {
    file.details["operation_number"] = static_cast<int64_t>(*details.operation_number);
  }
  if (details.culprit) file.details["culprit"] = int64_t{details.culprit->value};
  if (details.culprit_world_rank) {
    file.details["culprit_world_rank"] = int64_t{details.culprit_world_rank->value};
  }
  if (details.reporter) file.details["reporter"] = int64_t{details.reporter->value};
  if (details.is_own_limit) file.details["is_own_limit"] = int64_t{1};
}

}  // namespace

ExceptionText describe_exception(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const std::exception& error) {
    return {.type = demangled(typeid(error).name()), .what = error.what()};
  } catch (...) {  // no std::exception, so only the type is known
    const std::type_info* const type = abi::__cxa_current_exception_type();
    return {.type = type == nullptr ? "an unknown exception" : demangled(type->name()), .what = ""};
  }
}

ErrorFile exception_file(const std::exception_ptr& exception) {
  const int64_t now_ms = wall_clock_milliseconds();
  ErrorFile file{.message = one_text(describe_exception(exception)),
                 .timestamp_s = now_ms / 1000,
                 .details = {{kTimeDetail, now_ms}, {"process", int64_t{::getpid()}}}};
  if (const char* rank = std::getenv("RANK"); rank != nullptr) file.details["rank"] = rank;
  file.call_stack = file.message + "\n";
  std::exception_ptr nested = nested_in(exception);
  for (size_t i = 0; nested && i < kMaxNested; ++i) {
    file.call_stack += "caused by " + one_text(describe_exception(nested)) + "\n";
    nested = nested_in(nested);
  }
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    add_details(error, file);
  } catch (...) {  // other exceptions have no details
  }
  return file;
}

Status write_exception(const std::string& path, const std::exception_ptr& exception) {
  if (path.empty()) return {};
  const std::string text = encode_error_file(exception_file(exception));
  return replace_file(path, std::as_bytes(std::span(text)));
}

}  // namespace cadre::os
