#include "cadre/testing/core/transport_group.h"

#include <chrono>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/transport/shm/shm_transport.h"
#include "cadre/core/transport/tcp/tcp_links.h"
#include "cadre/testing/core/host_memories.h"
#include "cadre/testing/core/ranks.h"

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
    interrupts_.push_back(std::make_unique<os::Interrupt>());
  }
  kind == TransportKind::kTcp ? connect_tcp(world_size) : share_memory(world_size);
}

TransportGroup::~TransportGroup() = default;

// The lower rank of each pair opens the connection.
void TransportGroup::connect_tcp(int world_size) {
  const Deadline deadline = system_.deadline_in(kConnectTimeout);
  std::vector<int> members;
  for (int rank = 0; rank < world_size; ++rank) {
    members.push_back(rank);
    links_.push_back(std::make_shared<TcpLinks>(
        system_, TcpLinksOptions{rank, world_size, is_crowded(world_size)}, [](int peer, Deadline) {
          return Error(ErrorCode::kTimeout,
                       cadre::format("the connection to rank {} is not usable yet", peer));
        }));
  }
  const auto listener = system_.listen({os::Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
  for (int low = 0; low < world_size; ++low) {
    for (int high = low + 1; high < world_size; ++high) {
      auto dialed = system_.connect(listener->address(), deadline).value_or_throw();
      links_of(low).add(high, std::move(dialed), ConnectionEnd::kDialed);
      links_of(high).add(low, accept(system_, *listener, deadline));
    }
  }
  for (int rank = 0; rank < world_size; ++rank) {
    transports_.push_back(
        links_of(rank).open({.purpose = kCollectivePurpose}, members, rank, interrupt_of(rank)));
  }
}

void TransportGroup::share_memory(int world_size) {
  const auto memories = make_host_memories(
      system_, {.num_slots = world_size,
                .slice_bytes = static_cast<size_t>(world_size + 1) * 2 * kRingBytes});
  const std::vector<int> slots = all_slots(world_size);
  std::vector<Piece> pages;
  std::vector<Place> places;
  for (const auto& memory : memories) {
    pages.push_back(ShmTransport::cut_page(*memory, slots).value_or_throw());
    places.push_back(pages.back().place());
  }
  for (size_t rank = 0; rank < memories.size(); ++rank) {
    transports_.push_back(std::make_unique<ShmTransport>(
        system_, *interrupts_[rank],
        ShmTransportSetup{memories[rank], static_cast<int>(rank), is_crowded(world_size),
                          kRingBytes, slots, places, std::move(pages[rank])}));
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
