// Connects the transports of all ranks of a group in one process, for tests and benches of code
// that uses transports.
//
// Threads: of(rank) may be used only by the thread that acts as that rank; run() starts one thread
// for each rank. Blocking: the constructor connects; run() waits until all ranks have ended.
// Errors: the constructor throws; run() returns errors as text.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/os/interrupt.h"
#include "cadre/core/os/system.h"
#include "cadre/core/transport/tcp/tcp_links.h"
#include "cadre/core/transport/transport.h"

namespace cadre::testing {

enum class TransportKind { kTcp, kShm };

std::string_view to_string(TransportKind kind);

class TransportGroup {
 public:
  static constexpr size_t kRingBytes = 64 << 10;

  TransportGroup(os::System& system, TransportKind kind, int world_size);
  ~TransportGroup();

  os::System& system() const { return system_; }
  int world_size() const { return static_cast<int>(transports_.size()); }
  Transport& of(Rank rank) const { return *transports_[static_cast<size_t>(rank.value)]; }
  os::Interrupt& interrupt_of(Rank rank) const {
    return *interrupts_[static_cast<size_t>(rank.value)];
  }
  // Returns the rank's TCP links, on which another group of the same ranks can be opened. For TCP
  // only.
  TcpLinks& links_of(Rank rank) const { return *links_[static_cast<size_t>(rank.value)]; }
  // Closes all channels of the rank, as at the orderly end of a rank.
  void close(Rank rank) { transports_[static_cast<size_t>(rank.value)].reset(); }

  // Runs the body as every rank, each in its own thread. Returns the errors of the ranks, one in
  // each line; an empty text if all returned.
  std::string run(const std::function<void(Transport&)>& body) const;

 private:
  void connect_tcp(int world_size);
  void share_memory(int world_size);
  bool is_crowded(int world_size) const { return world_size > system_.host().num_cores; }

  os::System& system_;
  std::vector<std::unique_ptr<os::Interrupt>> interrupts_;
  // Shared with the transports. Empty if the transports use shared memory.
  std::vector<std::shared_ptr<TcpLinks>> links_;
  std::vector<std::unique_ptr<Transport>> transports_;
};

}  // namespace cadre::testing
