// Makes an authority and certificates that it has issued, for tests of TLS on loopback.
//
// Threads: one owner. Blocking: while `openssl` runs. Lifetime: the destructor removes the files.
// Errors: throws Error(kInternal) with the command that failed.
#pragma once

#include <cstdlib>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::testing {

class Certificates {
 public:
  // A certificate and its key, both as the paths of files in PEM format.
  struct Pair {
    std::string certificate;
    std::string private_key;
  };

  // Returns why no certificates can be made here; empty if they can.
  static std::string obstacle() {
    const bool is_there = std::system("openssl version >/dev/null 2>&1") == 0;
    return is_there ? "" : "openssl is not installed (Debian's package openssl)";
  }

  Certificates() { make(authority_, ""); }

  const std::string& authority() const { return authority_.certificate; }
  // Returns a new certificate for 127.0.0.1, with which both servers and clients can show who they
  // are.
  Pair issue(const std::string& name) const {
    const Pair issued = pair_of(name);
    make(issued, format("-CA '{}' -CAkey '{}' -addext subjectAltName=IP:127.0.0.1",
                        authority_.certificate, authority_.private_key));
    return issued;
  }

 private:
  Pair pair_of(const std::string& name) const {
    return {.certificate = folder_.file(name + ".pem"), .private_key = folder_.file(name + ".key")};
  }
  static void make(const Pair& pair, const std::string& options) {
    const std::string command = format(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj "
        "/CN=cadre-test -keyout '{}' -out '{}' {} >/dev/null 2>&1",
        pair.private_key, pair.certificate, options);
    if (std::system(command.c_str()) == 0) return;
    throw Error(ErrorCode::kInternal, format("failed: {}", command));
  }

  const TemporaryFolder folder_;
  const Pair authority_ = pair_of("authority");
};

}  // namespace cadre::testing
