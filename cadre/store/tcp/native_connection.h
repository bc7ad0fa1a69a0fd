// The client's side of the native store protocol.
//
// Threads, blocking, lifetime and errors: server_connection.h. After a timeout the connection stays
// usable: the request is cancelled, and an answer that came too late is known by its id.
// Format: docs/formats/store-native.md.
#pragma once

#include <memory>
#include <string>

#include "cadre/os/host/secret.h"
#include "cadre/store/tcp/server_connection.h"

namespace cadre::store {

class NativeConnection final : public ServerConnection {
 public:
  static Result<std::unique_ptr<ServerConnection>> open(os::System& system, BlockingStream stream,
                                                        const os::Secret& token, Deadline deadline);
  explicit NativeConnection(BlockingStream stream) : stream_(std::move(stream)) {}

  Result<wire::StoreResponse> call(wire::StoreRequest request, Deadline deadline) override;
  bool is_usable() const override { return is_usable_; }

 private:
  // The answer to request `id`; those of requests that were given up before are skipped.
  Result<wire::StoreResponse> receive_answer(uint64_t id, Deadline deadline);

  BlockingStream stream_;
  uint64_t last_id_ = 0;
  bool is_usable_ = true;
};

}  // namespace cadre::store
