// The fixture of the tests of the TCP store: a server, its log, and connections on which a test
// sends arbitrary bytes.
//
// Threads: one thread; the log from any.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>

#include "cadre/core/os/system.h"
#include "cadre/core/store/tcp/tcp_store.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre {

class CollectingLog final : public LogSink {
 public:
  void write(LogLevel, std::string_view, std::string_view message) override {
    const std::lock_guard lock(mutex_);
    text_ += std::string(message) + "\n";
  }
  std::string text() {
    const std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

// Returns the first message of a client that runs the build `build` of Cadre.
inline std::string hello_of_build(const std::string& build) {
  return std::string(
      wire::as_text(wire::encode({.verb = wire::StoreVerb::kHello,
                                  .amount = wire::kStoreProtocol,
                                  .keys = {build},
                                  .values = {std::string(wire::kNonceBytes, 'n')}})));
}

class TcpStoreTest : public ::testing::Test {
 protected:
  Deadline soon() { return system_->deadline_in(std::chrono::seconds(20)); }

  std::unique_ptr<TcpStoreServer> start(TcpStoreServerOptions options = {}) {
    options.token = "secret";
    options.log = &log_;
    return TcpStoreServer::start(*system_, options).value_or_throw();
  }
  Result<std::unique_ptr<TcpStore>> connect(const TcpStoreServer& server,
                                            const std::string& token = "secret") {
    return TcpStore::connect(*system_, {.address = server.address(), .token = token}, soon());
  }

  // Connects without the client's handshake, sends `bytes`, and returns the bytes that are received
  // until the server closes the connection.
  std::string say(const TcpStoreServer& server, ConstBytes bytes) {
    auto socket = system_->connect(server.address(), soon()).value_or_throw();
    const Deadline deadline = soon();
    std::string heard;
    std::array<std::byte, 4096> buffer;
    while (true) {
      if (!bytes.empty()) {
        const auto sent = socket->try_send(bytes);
        if (!sent.ok()) return heard;
        bytes = bytes.subspan(*sent);
      }
      const auto received = socket->try_recv(buffer);
      if (!received.ok()) return heard;
      heard += wire::as_text(ConstBytes(buffer).first(*received));
      os::PollItem item{.target = socket.get(), .want_read = true, .want_write = !bytes.empty()};
      if (!system_->poll(std::span(&item, 1), deadline)) {
        ADD_FAILURE()
            << "the server did not close a connection without a valid handshake; received "
            << heard.size() << " bytes";
        return heard;
      }
    }
  }
  std::string say(const TcpStoreServer& server, std::string_view text) {
    return say(server, wire::as_bytes(text));
  }

  std::unique_ptr<os::System> system_ = os::make_native_system();
  CollectingLog log_;
};

}  // namespace cadre
