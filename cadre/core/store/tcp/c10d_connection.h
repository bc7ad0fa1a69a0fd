// The client's side of c10d's TCPStore protocol: for our ranks under torchrun, whose agent hosts
// the store.
//
// Threads, blocking, lifetime and errors: server_connection.h. Its answers carry no ids, so after a
// timeout the connection is no longer usable. set, append and multi_set have no answer in this
// protocol; a ping behind them tells that they were carried out.
// Format: docs/formats/store-c10d.md.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cadre/core/store/tcp/server_connection.h"
#include "cadre/core/wire/store/c10d_message.h"

namespace cadre::store {

class C10dConnection final : public ServerConnection {
 public:
  static Result<std::unique_ptr<ServerConnection>> open(os::System& system, BlockingStream stream,
                                                        Deadline deadline);
  explicit C10dConnection(BlockingStream stream) : stream_(std::move(stream)) {}

  Result<wire::StoreResponse> call(wire::StoreRequest request, Deadline deadline) override;
  bool is_usable() const override { return is_usable_; }

 private:
  Status send(const wire::C10dRequest& request, Deadline deadline);
  Status ping(uint32_t nonce, Deadline deadline);
  Status wait(const std::vector<std::string>& keys, Deadline deadline);
  Result<wire::StoreResponse> translate(wire::StoreRequest request, Deadline deadline);
  // The verbs of queues, list_keys and barrier.
  Result<wire::StoreResponse> translate_rest(wire::StoreVerb verb, wire::C10dRequest& message,
                                             Deadline deadline);
  // Takes the first item of a queue; with `waits` once there is one.
  Result<wire::StoreResponse> pop(const std::string& queue, bool waits, Deadline deadline);
  Result<wire::StoreResponse> list_keys(Deadline deadline);
  Result<wire::StoreResponse> receive_number(Deadline deadline);
  Result<wire::StoreResponse> receive_values(size_t count, Deadline deadline);

  BlockingStream stream_;
  uint32_t next_nonce_ = 0;
  bool is_usable_ = true;
};

}  // namespace cadre::store
