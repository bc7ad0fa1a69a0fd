// The NCCL of this process, which is loaded at run time.
//
// Threads: any. Blocking: while the dynamic linker reads the library. Lifetime: the library stays
// loaded until the process ends. Errors: kUnavailable in one sentence that says which library or
// function is missing.
#pragma once

#include <string>

#include "cadre/core/base/error.h"
#include "cadre/tensor/backends/nccl/nccl_api.h"

namespace cadre::nccl {

class Library {
 public:
  // Loads the library of this path; if it is empty, "libnccl.so.2", which is the one that libtorch
  // uses if libtorch has loaded it (find_devices()).
  static Result<Library> load(const std::string& path);

  const Api& api() const { return api_; }
  // Returns the version, for example "2.28.9".
  const std::string& version() const { return version_; }
  // Returns the library's text for the code and its last message, with the version and a remedy.
  // `comm` may be null.
  std::string describe(Code code, Comm* comm) const;

 private:
  Library() = default;

  Api api_;
  std::string version_;
};

}  // namespace cadre::nccl
