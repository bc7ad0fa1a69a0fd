// Calls of an etcd server by its JSON gateway: HTTP requests with JSON bodies, in which keys and
// values are base64.
//
// Threads: one owner at a time. Blocking: each call, until its deadline at most. Lifetime: borrows
// the System. Errors: kUnavailable or kTimeout if the server does not answer or reports an error,
// with the address and what to do; kCorruption for an answer that is not etcd's.
// Source: https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/os/system.h"

namespace cadre::cli {

struct EtcdOptions {
  std::string protocol = "http";  // or "https"
  std::string address;            // HOST:PORT
  // Files in PEM format; empty: the system's authorities, and no certificate of this client.
  std::string authorities;
  std::string certificate;
  std::string private_key;

  std::string url() const { return protocol + "://" + address; }
};

class EtcdClient {
 public:
  using LeaseId = int64_t;
  struct Entry {
    std::string value;
    int64_t revision = 0;  // the number of the last change of the key
    LeaseId lease = 0;

    friend bool operator==(const Entry&, const Entry&) = default;
  };

  static Result<EtcdClient> make(os::System& system, EtcdOptions options);
  EtcdClient(EtcdClient&&) noexcept;
  ~EtcdClient();

  Result<std::optional<Entry>> get(const std::string& key, Deadline deadline);
  // Writes the value if the last change of the key has `revision`, 0: if there is no such key.
  // Returns whether it did. The key is removed when the lease ends.
  Result<bool> put_if(const std::string& key, int64_t revision, const std::string& value,
                      LeaseId lease, Deadline deadline);
  // Returns a new lease of so many seconds.
  Result<LeaseId> grant_lease(int64_t seconds, Deadline deadline);
  // Returns whether the lease was renewed; false if it has ended.
  Result<bool> keep_lease(LeaseId lease, Deadline deadline);
  // Ends the lease, which removes its keys.
  Status revoke_lease(LeaseId lease, Deadline deadline);

 private:
  class Http;
  explicit EtcdClient(std::unique_ptr<Http> http);

  std::unique_ptr<Http> http_;
};

}  // namespace cadre::cli
