#include "cadre/testing/transport_group.h"

#include <chrono>

#include "cadre/base/format.h"
#include "cadre/testing/ranks.h"
#include "cadre/transport/shm/shm_transport.h"
#include "cadre/transport/tcp/tcp_transport.h"

namespace cadre::testing {
namespace {

constexpr Duration kConnectTimeout = std::chrono::seconds(10);

std::unique_ptr<os::Socket> accept(os::System& system, os::Listener& listener, Deadline deadline) {
  for (;;) {
    auto socket = listener.try_accept().value_or_throw();
    if (socket) return socket;
    os::PollItem item{.target = &listener, .want_read = true};
    require(system.poll(std::span(&item, 1), deadline), "accept: no connection in time");
  }
}

}  // namespace

std::string_view to_string(TransportKind kind) {
  return kind == TransportKind::kTcp ? "Tcp" : "Shm";
}

TransportGroup::TransportGroup(os::System& system, TransportKind kind, int world_size)
    : system_(system) {
  for (int rank = 0; rank < world_size; ++rank) {
    interrupts_.push_back(std::make_unique<os::Interrupt>(system));
  }
  kind == TransportKind::kTcp ? connect_tcp(world_size) : share_memory(world_size);
}

TransportGroup::~TransportGroup() = default;

void TransportGroup::connect_tcp(int world_size) {
  const auto size = static_cast<size_t>(world_size);
  const Deadline deadline = system_.deadline_in(kConnectTimeout);
  std::vector<std::vector<std::unique_ptr<os::Socket>>> sockets(size);
  for (auto& peers : sockets) peers.resize(size);
  const auto listener = system_.listen({os::Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
  for (size_t low = 0; low < size; ++low) {
    for (size_t high = low + 1; high < size; ++high) {
      sockets[low][high] = system_.connect(listener->address(), deadline).value_or_throw();
      sockets[high][low] = accept(system_, *listener, deadline);
    }
  }
  for (size_t rank = 0; rank < size; ++rank) {
    transports_.push_back(std::make_unique<TcpTransport>(
        system_, *interrupts_[rank],
        TcpTransportOptions{static_cast<int>(rank), is_crowded(world_size)},
        std::move(sockets[rank])));
  }
}

void TransportGroup::share_memory(int world_size) {
  const std::shared_ptr<os::SharedMemory> segment =
      system_.create_segment(ShmTransport::segment_bytes(world_size, kRingBytes)).value_or_throw();
  for (int rank = 0; rank < world_size; ++rank) {
    transports_.push_back(std::make_unique<ShmTransport>(
        system_, *interrupts_[static_cast<size_t>(rank)],
        ShmTransportOptions{rank, world_size, is_crowded(world_size)}, segment));
  }
}

std::string TransportGroup::run(const std::function<void(Transport&)>& body) const {
  std::vector<std::string> failures(transports_.size());
  std::vector<std::unique_ptr<os::Thread>> threads;
  for (size_t rank = 0; rank < transports_.size(); ++rank) {
    threads.push_back(system_.spawn(cadre::format("rank{}", rank), [&, rank] {
      failures[rank] = failure_of([&] { body(*transports_[rank]); });
    }));
  }
  for (const auto& thread : threads) thread->join();
  std::string text;
  for (size_t rank = 0; rank < failures.size(); ++rank) {
    if (!failures[rank].empty()) text += cadre::format("rank {}: {}\n", rank, failures[rank]);
  }
  return text;
}

}  // namespace cadre::testing
