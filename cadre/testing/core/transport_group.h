// Connects all transports of one group in one process, for tests and benches of the code that uses
// transports.
//
// Threads: of(rank) belongs to the thread that acts as that rank; run() starts one for each.
// Blocking: the constructor connects; run() until all ranks have ended. Lifetime: nothing is left
// behind. Errors: the constructor throws; run() returns errors as text.
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
  // Returns the rank's TCP links, on which a further group between the ranks can be opened. TCP
  // only.
  TcpLinks& links_of(Rank rank) const { return *links_[static_cast<size_t>(rank.value)]; }
  // Closes all channels of the rank, as a rank that ends in an orderly way does.
  void close(Rank rank) { transports_[static_cast<size_t>(rank.value)].reset(); }

  // Runs the body as every rank, each in a thread of its own. Returns the errors of the ranks, one
  // a line; an empty text if all returned.
  std::string run(const std::function<void(Transport&)>& body) const;

 private:
  void connect_tcp(int world_size);
  void share_memory(int world_size);
  bool is_crowded(int world_size) const { return world_size > system_.host().num_cores; }

  os::System& system_;
  std::vector<std::unique_ptr<os::Interrupt>> interrupts_;
  // Shared with the transports; empty over shared memory.
  std::vector<std::shared_ptr<TcpLinks>> links_;
  std::vector<std::unique_ptr<Transport>> transports_;
};

}  // namespace cadre::testing
