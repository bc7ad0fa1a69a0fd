// The client's side of the native store protocol.
//
// Threads, blocking, lifetime and errors: server_connection.h. At its deadline a request is
// cancelled and the answer to that is waited for, so that the connection stays usable and nothing
// that the server has given away is lost. Format: docs/formats/store-native.md.
#pragma once

#include <memory>
#include <string>

#include "cadre/core/os/host/secret.h"
#include "cadre/core/store/tcp/server_connection.h"

namespace cadre::store {

class NativeConnection final : public ServerConnection {
 public:
  static Result<std::unique_ptr<ServerConnection>> open(os::System& system, BlockingStream stream,
                                                        const os::Secret& token, Deadline deadline);
  explicit NativeConnection(BlockingStream stream) : stream_(std::move(stream)) {}

  Result<wire::StoreResponse> call(wire::StoreRequest request, Deadline deadline) override;
  bool is_usable() const override { return is_usable_; }

 private:
  Result<wire::StoreResponse> cancel(uint64_t id);
  Result<wire::StoreResponse> receive_answer(uint64_t id, Deadline deadline);

  BlockingStream stream_;
  uint64_t last_id_ = 0;
  bool is_usable_ = true;
};

}  // namespace cadre::store
