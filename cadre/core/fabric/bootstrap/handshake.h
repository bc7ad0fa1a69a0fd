// The handshake of one connection between two ranks, or between the agents of two hosts. The rank
// that connects sends its number and the purpose of the connection. Then each end proves that it
// has the job's token, first the rank that connects. The handshake reads no byte beyond its own
// messages. If the job has no token or the connection is a unix socket, the process at the other
// end must belong to this user or to root.
//
// Threads: one owner. Blocking: never; step() is called when the socket is ready.
// Lifetime: owns its socket until take(). Errors: step() fails if the connection must not be used.
// The message contains the reason that the other end gave.
// Format: docs/formats/control-messages.md.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/os/system.h"
#include "cadre/core/wire/control.h"

namespace cadre {

// The values on which both ends must agree before anything else.
struct LinkIdentity {
  Rank rank;  // the rank at this end
  uint64_t round = 0;
  std::string group;
  std::string version;
  os::Secret job_token;
};

class Handshake {
 public:
  // Makes the handshake of the process that has opened the connection.
  static Handshake call(os::System& system, std::unique_ptr<os::Socket> socket,
                        const LinkIdentity& identity, Rank to, wire::LinkPurpose purpose);
  // Makes the handshake of the process that has accepted the connection.
  static Handshake answer(os::System& system, std::unique_ptr<os::Socket> socket,
                          const LinkIdentity& identity);

  // Advances the handshake as far as possible without blocking.
  Status step();
  bool is_done() const { return state_ == State::kDone && outgoing_.empty(); }
  // Returns whether this process accepted the connection, has sent its challenge, and waits for the
  // other end's proof.
  bool wants_answer() const { return state_ == State::kWantAnswer; }
  os::PollItem interest() const;

  // Returns the hello of the rank that connected. The process that accepted the connection has it
  // once is_done() is true.
  const wire::Hello& hello() const { return hello_; }
  // Returns the address of the other end.
  std::string peer() const { return socket_->peer_address().to_string(); }
  // REQUIRES: is_done().
  std::unique_ptr<os::Socket> take() { return std::move(socket_); }

 private:
  enum class State { kWantHello, kWantChallenge, kWantAnswer, kWantAcceptance, kDone };

  Handshake(os::System& system, std::unique_ptr<os::Socket> socket, const LinkIdentity& identity,
            State state);
  Status flush();
  // Returns one whole message; nullopt if bytes are missing. Reads no byte of the next message.
  Result<std::optional<wire::ControlMessage>> receive();
  Status handle(const wire::ControlMessage& message);
  Status handle_hello(const wire::Hello& hello);
  Status handle_challenge(const wire::Challenge& challenge);
  Status handle_answer(const wire::Answer& answer);
  Status handle_acceptance(const wire::Acceptance& acceptance);
  Status check_user();
  void send(const wire::ControlMessage& message);
  Error refuse(std::string reason);
  // Return the names of the ends in messages: "rank 3", or an address if the ends are agents.
  std::string peer_name(Rank rank) const;
  std::string own_name() const;
  // Returns the proof that one end has the token. It covers the name of the end ("call" or
  // "answer"), the purpose, both ranks, the round and the group, so it is valid for no other
  // connection.
  Result<wire::Proof> proof_of(std::string_view end) const;

  os::System* system_;  // never null; a pointer so that handshakes can be moved in a vector
  std::unique_ptr<os::Socket> socket_;
  LinkIdentity identity_;
  State state_;
  wire::Hello hello_;
  wire::Nonce answer_nonce_{};
  std::vector<std::byte> incoming_;
  std::vector<std::byte> outgoing_;
};

}  // namespace cadre
