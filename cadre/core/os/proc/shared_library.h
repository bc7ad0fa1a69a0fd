// A library that a program loads when it first needs it, so that the program starts without it.
//
// Threads: any. Blocking: while the dynamic linker reads the library and those that it needs.
// Lifetime: the library stays loaded until the process ends. Errors: kUnavailable with the dynamic
// linker's reason.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre::os {

class CADRE_EXPORT SharedLibrary {
 public:
  // `name` is a file name that the dynamic linker finds, such as "libcurl.so.4"; `package` is the
  // package of Debian that contains it, for the error.
  static Result<SharedLibrary> load(const std::string& name, std::string_view package);

  // Stores the address of the function in `function`.
  template <typename Function>
  Status find(const char* function_name, Function*& function) const {
    auto address = find_address(function_name);
    if (!address.ok()) return address.error();
    function = reinterpret_cast<Function*>(*address);
    return {};
  }

 private:
  SharedLibrary(std::string name, void* handle) : name_(std::move(name)), handle_(handle) {}
  Result<void*> find_address(const char* function_name) const;

  std::string name_;
  void* handle_;
};

}  // namespace cadre::os
