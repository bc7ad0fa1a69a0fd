// The server's side of the native store protocol: handshake, then requests in any number at once.
//
// Threads, blocking, lifetime and errors: session.h. Format: docs/formats/store-native.md.
#pragma once

#include <map>
#include <string>

#include "cadre/store/tcp/session.h"
#include "cadre/wire/store_message.h"

namespace cadre::store {

class NativeSession final : public Session {
 public:
  // `nonce` is fresh and unpredictable. `token` is borrowed from the server.
  NativeSession(KeyTable& table, TicketSource tickets, const std::string& token, wire::Nonce nonce);
  ~NativeSession() override;

  Result<bool> step(wire::StreamBuffer& in, wire::StreamBuffer& out) override;
  void on_ready(KeyTable::Ticket ticket, wire::StreamBuffer& out) override;
  bool is_accepted() const override { return phase_ == Phase::kServing; }

 private:
  enum class Phase { kHello, kProof, kServing };

  Status on_hello(ConstBytes payload, wire::StreamBuffer& out);
  Status on_proof(ConstBytes payload, wire::StreamBuffer& out);
  Status on_request(ConstBytes payload, wire::StreamBuffer& out);
  // The response of a request that never waits.
  wire::StoreResponse answer(const wire::StoreRequest& request);
  // The response of get, wait and multi_get once their keys are there.
  wire::StoreResponse answer_wait(const wire::StoreRequest& request) const;
  void cancel(uint64_t request_id);

  KeyTable& table_;
  TicketSource tickets_;
  const std::string& token_;
  wire::StoreHello hello_;  // ours
  wire::StoreHello client_hello_;
  Phase phase_ = Phase::kHello;
  std::map<KeyTable::Ticket, wire::StoreRequest> pending_;
};

}  // namespace cadre::store
