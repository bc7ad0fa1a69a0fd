// The server's side of the native store protocol: handshake, then requests in any number at once.
//
// Threads, blocking, lifetime and errors: session.h. Format: docs/formats/store-native.md.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "cadre/core/os/host/secret.h"
#include "cadre/core/store/tcp/session.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre::store {

class NativeSession final : public Session {
 public:
  // `nonce` is fresh and unpredictable. `token` is borrowed from the server.
  NativeSession(KeyTable& table, TicketSource tickets, const os::Secret& token, wire::Nonce nonce);
  ~NativeSession() override;

  Result<bool> step(wire::StreamBuffer& in, wire::StreamBuffer& out) override;
  void on_ready(KeyTable::Ticket ticket, wire::StreamBuffer& out) override;
  bool is_accepted() const override { return phase_ == Phase::kServing; }
  bool has_greeted() const override { return phase_ != Phase::kHello; }

 private:
  enum class Phase { kHello, kProof, kServing };

  Status on_hello(ConstBytes payload, wire::StreamBuffer& out);
  Status on_proof(ConstBytes payload, wire::StreamBuffer& out);
  Status on_request(ConstBytes payload, wire::StreamBuffer& out);
  // The response of a request for which all that it waits for is there.
  wire::StoreResponse answer(const wire::StoreRequest& request);
  // Starts a request that may wait. True when its response, in `response`, is ready at once.
  Result<bool> begin_wait(KeyTable::Ticket ticket, const wire::StoreRequest& request,
                          wire::StoreResponse& response);
  // Answers a request that waits with its timeout. One that does not wait has been answered.
  void cancel(uint64_t request_id, wire::StreamBuffer& out);

  KeyTable& table_;
  TicketSource tickets_;
  const os::Secret& token_;
  wire::StoreHello hello_;  // ours
  wire::StoreHello client_hello_;
  Phase phase_ = Phase::kHello;
  std::map<KeyTable::Ticket, wire::StoreRequest> pending_;
  // What is appended to which key when the connection ends without a retraction.
  std::optional<std::pair<std::string, std::string>> will_;
};

}  // namespace cadre::store
