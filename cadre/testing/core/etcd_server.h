// Runs a real etcd for tests, on loopback or another address of this host, with its data in a
// folder of its own.
//
// Threads: one owner. Blocking: start() until the server serves requests, at most kPatience.
// Lifetime: the destructor kills the server.
#pragma once

#include <signal.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/environment.h"
#include "cadre/core/os/proc/executable.h"
#include "cadre/core/os/proc/process.h"
#include "cadre/core/os/proc/temporary_folder.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/reserved_port.h"

namespace cadre::testing {

class EtcdServer {
 public:
  static constexpr Duration kPatience = std::chrono::seconds(60);

  // Returns why there is no etcd here; empty if there is.
  static std::string obstacle() {
    const auto found = os::find_executable("etcd", search_path());
    return found.ok() ? "" : "etcd is not installed (Debian's package etcd-server)";
  }

  // Files in PEM format, with which the server speaks TLS: the authority of its clients'
  // certificates, and its own certificate and key.
  struct Tls {
    std::string authorities;
    std::string certificate;
    std::string private_key;
  };

  explicit EtcdServer(std::optional<Tls> tls = std::nullopt, std::string host = "127.0.0.1")
      : host_(std::move(host)), port_(host_), tls_(std::move(tls)) {
    start();
  }

  std::string address() const { return format("{}:{}", host_, port_.number()); }
  std::string peer_address() const { return format("127.0.0.1:{}", peer_port_.number()); }
  // Stops all threads of the server by SIGSTOP.
  void freeze() {
    process_->signal(SIGSTOP);
    while (!process_->stop_signal()) pause();
  }
  // Kills the server. Its data stays.
  void stop() { process_.reset(); }
  void start() {
    const std::string client = (tls_ ? "https://" : "http://") + address();
    const std::string peer = "http://" + peer_address();
    os::Environment environment = os::read_environment();
    environment.set("ETCD_UNSUPPORTED_ARCH", "arm64");  // etcd asks for it on such a machine
    if (tls_) {
      environment.set("ETCD_CLIENT_CERT_AUTH", "true");
      environment.set("ETCD_TRUSTED_CA_FILE", tls_->authorities);
      environment.set("ETCD_CERT_FILE", tls_->certificate);
      environment.set("ETCD_KEY_FILE", tls_->private_key);
    }
    process_ = os::Process::start(
                   {.executable = os::find_executable("etcd", search_path()).value_or_throw(),
                    .arguments = {"etcd", "--data-dir", folder_->path(), "--listen-client-urls",
                                  client, "--advertise-client-urls", client, "--listen-peer-urls",
                                  peer, "--listen-metrics-urls",
                                  format("http://127.0.0.1:{}", health_port_.number()),
                                  "--initial-advertise-peer-urls", peer, "--initial-cluster",
                                  "default=" + peer, "--logger", "zap", "--log-level", "fatal"},
                    .environment = environment.to_texts()})
                   .value_or_throw();
    const Deadline deadline = system_->deadline_in(kPatience);
    while (!is_healthy(deadline)) {
      if (deadline.has_passed(system_->now()))
        throw Error(ErrorCode::kTimeout, "etcd is not ready");
      pause();
    }
  }

 private:
  static std::string search_path() { return os::read_environment().get_or("PATH", "/usr/bin"); }
  // Returns whether the server serves requests. It accepts connections earlier, before its cluster
  // has a leader.
  bool is_healthy(Deadline deadline) {
    const os::Address address{os::Address::Kind::kTcp, "127.0.0.1", health_port_.number()};
    const auto socket = system_->connect(address, deadline);
    constexpr std::string_view kRequest = "GET /health HTTP/1.0\r\n\r\n";
    if (!socket.ok() || !(*socket)->try_send(std::as_bytes(std::span(kRequest))).ok()) return false;
    std::string answer;
    std::array<std::byte, 1024> buffer;
    while (!deadline.has_passed(system_->now())) {
      const auto received = (*socket)->try_recv(buffer);
      if (!received.ok()) break;
      answer.append(reinterpret_cast<const char*>(buffer.data()), *received);
      if (*received == 0) pause();
    }
    return answer.find("\"health\":\"true\"") != std::string::npos;
  }
  void pause() {
    system_->make_waiter()->park(system_->deadline_in(std::chrono::milliseconds(20)));
  }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
  // etcd waits for the disk at each write, so its data is in memory, if that is possible.
  const std::unique_ptr<os::TemporaryFolder> folder_ =
      os::TemporaryFolder::make(std::filesystem::exists("/dev/shm")
                                    ? std::filesystem::path("/dev/shm")
                                    : std::filesystem::temp_directory_path(),
                                "cadre-test-")
          .value_or_throw();
  const std::string host_;
  const ReservedPort port_;
  const ReservedPort peer_port_;
  const ReservedPort health_port_;
  const std::optional<Tls> tls_;
  std::unique_ptr<os::Process> process_;
};

}  // namespace cadre::testing
