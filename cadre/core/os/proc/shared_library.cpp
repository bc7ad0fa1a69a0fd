#include "cadre/core/os/proc/shared_library.h"

#include <dlfcn.h>

#include "cadre/core/base/format.h"

namespace cadre::os {

Result<SharedLibrary> SharedLibrary::load(const std::string& name, std::string_view package) {
  void* const handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr) return SharedLibrary(name, handle);
  return Error(ErrorCode::kUnavailable, cadre::format("cannot load {} (package {} of Debian): {}",
                                                      name, package, ::dlerror()));
}

Result<void*> SharedLibrary::find_address(const char* function_name) const {
  void* const address = ::dlsym(handle_, function_name);
  if (address != nullptr) return address;
  return Error(ErrorCode::kUnavailable,
               cadre::format("{} has no function {}", name_, function_name));
}

}  // namespace cadre::os
