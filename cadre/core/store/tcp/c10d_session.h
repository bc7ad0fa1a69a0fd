// The server's side of c10d's TCPStore protocol: for unmodified PyTorch ranks on this host.
//
// Threads, blocking, lifetime and errors: session.h. Format: docs/formats/store-c10d.md.
#pragma once

#include <optional>

#include "cadre/core/store/tcp/session.h"
#include "cadre/core/wire/store/c10d_message.h"

namespace cadre::store {

class C10dSession final : public Session {
 public:
  C10dSession(KeyTable& table, TicketSource tickets) : table_(table), tickets_(tickets) {}
  ~C10dSession() override;

  Result<bool> step(wire::StreamBuffer& in, wire::StreamBuffer& out) override;
  void on_ready(KeyTable::Ticket ticket, wire::StreamBuffer& out) override;
  bool is_accepted() const override { return is_validated_; }

 private:
  Status serve(const wire::C10dRequest& request, wire::StreamBuffer& out);
  // The verbs that change the table.
  Status write(const wire::C10dRequest& request, wire::StreamBuffer& out);
  void pop(const std::string& queue, wire::StreamBuffer& out);
  Status wait(const wire::C10dRequest& request, wire::StreamBuffer& out);
  void cancel_wait();

  KeyTable& table_;
  TicketSource tickets_;
  bool is_validated_ = false;
  size_t num_needed_ = 0;  // no use in decoding before so many bytes have come
  // A c10d client waits for one answer at a time.
  std::optional<KeyTable::Ticket> waiting_;
};

}  // namespace cadre::store
