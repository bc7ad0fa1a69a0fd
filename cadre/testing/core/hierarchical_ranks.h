// The ranks of a group on several hosts in one process, for tests and benches of the hierarchical
// engine: a transport between all ranks, and the shared memory of each pretended host.
//
// Threads: run() starts one thread for each rank. Blocking: run(), until all ranks have ended.
// Errors: the constructor throws; run() returns errors as text.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/collective/hierarchical/hierarchical_engine.h"
#include "cadre/testing/core/engine_caller.h"
#include "cadre/testing/core/host_engine_ranks.h"
#include "cadre/testing/core/transport_group.h"

namespace cadre {

// A Transport that counts the bytes that are sent to ranks on other hosts.
class CountingTransport final : public Transport {
 public:
  CountingTransport(Transport& inner, const std::vector<int>& host_of_rank) : inner_(inner) {
    const int own = host_of_rank[static_cast<size_t>(inner.rank().value)];
    for (const int host : host_of_rank) {
      channels_.push_back({nullptr, host == own ? &num_sent_inside_ : &num_sent_across_});
    }
  }

  Rank rank() const override { return inner_.rank(); }
  int world_size() const override { return inner_.world_size(); }
  Channel& channel(Rank peer) override {
    CountingChannel& channel = channels_[static_cast<size_t>(peer.value)];
    channel.inner = &inner_.channel(peer);
    return channel;
  }
  Status wait(std::span<const ChannelInterest> interests, Deadline deadline) override {
    return inner_.wait(interests, deadline);
  }
  void wake() override { inner_.wake(); }

  uint64_t num_sent_across() const { return num_sent_across_; }

 private:
  struct CountingChannel final : Channel {
    CountingChannel(Channel* inner_in, uint64_t* num_sent_in)
        : inner(inner_in), num_sent(num_sent_in) {}

    Result<size_t> try_send(ConstBytes data) override { return count(inner->try_send(data)); }
    Result<size_t> try_send_parts(const Parts& parts) override {
      return count(inner->try_send_parts(parts));
    }
    Result<size_t> try_recv(Bytes buffer) override { return inner->try_recv(buffer); }
    Result<size_t> count(Result<size_t> sent) {
      if (sent.ok()) *num_sent += *sent;
      return sent;
    }

    Channel* inner;
    uint64_t* num_sent;
  };

  Transport& inner_;
  std::vector<CountingChannel> channels_;
  uint64_t num_sent_inside_ = 0;
  uint64_t num_sent_across_ = 0;
};

class HierarchicalRank final : public EngineCaller {
 public:
  HierarchicalRank(os::System& system, Transport& transport, HierarchicalEngineSetup setup)
      : EngineCaller(system, transport.rank(), transport.world_size()),
        transport_(transport, setup.host_of_rank),
        engine_(system, transport_, std::move(setup)) {}

  HierarchicalEngine& engine() override { return engine_; }
  // Returns the number of bytes that this rank has sent to ranks on other hosts.
  uint64_t num_sent_across() const { return transport_.num_sent_across(); }

  Status all_reduce(ConstBytes in, Bytes out, ReduceKind kind) {
    return run(Collective::all_reduce(in, out, kind.dtype, kind.op));
  }
  Status reduce_scatter(ConstBytes in, Bytes out, ReduceKind kind) {
    return run(Collective::reduce_scatter(in, out, kind.dtype, kind.op));
  }

 private:
  CountingTransport transport_;
  HierarchicalEngine engine_;
};

class HostedGroup {
 public:
  // Ranks with equal numbers in `host_of_rank` share memory, except those of the hosts in
  // `without_memory`.
  HostedGroup(os::System& system, std::vector<int> host_of_rank,
              const std::vector<int>& without_memory = {})
      : system_(system),
        host_of_rank_(std::move(host_of_rank)),
        hosts_(host_of_rank_),
        transports_(system, testing::TransportKind::kTcp, hosts_.num_ranks()) {
    for (int host = 0; host < hosts_.num_hosts(); ++host) {
      const auto num_ranks = static_cast<int>(hosts_.ranks_of(host).size());
      const int named = host_of_rank_[static_cast<size_t>(hosts_.ranks_of(host).front().value)];
      const bool has_memory =
          num_ranks > 1 && std::ranges::find(without_memory, named) == without_memory.end();
      memories_.push_back(has_memory ? std::make_unique<TestMemory>(num_ranks) : nullptr);
    }
  }

  // Sets HierarchicalEngineSetup::piece_bytes of the engines that run() makes.
  void set_piece_bytes(uint64_t piece_bytes) { piece_bytes_ = piece_bytes; }
  const HostMap& hosts() const { return hosts_; }
  os::Interrupt& interrupt_of(Rank rank) const { return transports_.interrupt_of(rank); }
  // Runs the body as every rank, each in its own thread. Returns the errors of the ranks, one in
  // each line; an empty text if all returned.
  std::string run(const CrossoverTable& table,
                  const std::function<void(HierarchicalRank&, Rank)>& body) {
    return transports_.run([&](Transport& transport) {
      const Rank rank = transport.rank();
      HierarchicalRank engine(system_, transport,
                              {.host_of_rank = host_of_rank_,
                               .local = make_local(rank, transports_.interrupt_of(rank)),
                               .table = table,
                               .piece_bytes = piece_bytes_});
      body(engine, rank);
    });
  }

 private:
  std::unique_ptr<HostEngine> make_local(Rank rank, const os::Interrupt& interrupt) {
    const int host = hosts_.host_of(rank);
    TestMemory* const memory = memories_[static_cast<size_t>(host)].get();
    if (memory == nullptr) return nullptr;
    HostEngineSetup setup = memory->setup_of(hosts_.index_of(rank));
    setup.oversubscribed = hosts_.num_ranks() > system_.host().num_cores;
    setup.group_ranks = hosts_.ranks_of(host);
    return std::make_unique<HostEngine>(system_, interrupt, std::move(setup));
  }

  os::System& system_;
  const std::vector<int> host_of_rank_;
  const HostMap hosts_;
  testing::TransportGroup transports_;
  uint64_t piece_bytes_ = HierarchicalEngineSetup().piece_bytes;
  // memories_[h] is the memory of host h; null if its ranks share none.
  std::vector<std::unique_ptr<TestMemory>> memories_;
};

}  // namespace cadre
