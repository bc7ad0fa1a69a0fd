// The table of a job on several hosts: its hosts, its phase, its round and the counted restarts.
// The coordinator changes it and sends every version to all agents.
//
// Threads: plain values. Blocking: never. Format: docs/formats/host-table.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::launch {

// A random number of each agent's process. An agent that is started again is another agent.
using AgentId = uint64_t;

enum class Phase : uint8_t {
  kGathering,  // waits for hosts; no workers may run, agents kill those that do
  kStarting,   // the hosts of the next round confirm that they have this table
  kRunning,    // the workers of the round run
  kDraining,   // the hosts stop the workers of the round
  kDone,       // all workers ended with exit code 0
  kFailed,     // the job has failed; Table::reason says why
};
inline constexpr uint8_t kNumPhases = 6;

enum class HostState : uint8_t {
  kSpare,  // waits for a place in a round
  kIn,     // has a place in the present round
  kLost,   // had a place in the present round, and has no connection to the coordinator
};
inline constexpr uint8_t kNumHostStates = 3;

struct Host {
  AgentId id = 0;
  std::string name;
  std::string address;  // HOST:PORT of the agent
  std::string role;
  uint32_t num_slots = 1;  // its number of workers
  HostState state = HostState::kSpare;
  // The node rank that the user gave to the host, with the static rendezvous.
  std::optional<uint32_t> wanted_rank;
  // The rank of the host in the present round. A host keeps it in the next round if it is smaller
  // than the number of hosts.
  std::optional<uint32_t> node_rank;

  friend bool operator==(const Host&, const Host&) = default;
};

struct Table {
  static constexpr size_t kMaxHosts = 65536;
  static constexpr uint32_t kMaxSlots = 65536;
  static constexpr size_t kMaxTextBytes = 1024;
  static constexpr size_t kMaxQuorums = 64;

  std::string job;
  uint64_t epoch = 0;    // grows with each new coordinator
  uint64_t version = 0;  // grows with each change
  uint64_t round = 0;    // grows with each new set of workers; 0: none was started yet
  Phase phase = Phase::kGathering;
  AgentId coordinator = 0;
  uint32_t restarts_used = 0;
  // The agent that proposed the first round; 0 before. It distinguishes this job from earlier and
  // later ones with the same name.
  AgentId first_coordinator = 0;
  std::string reason;
  std::vector<Host> hosts;
  // A new round needs a majority of each of these sets: the hosts of the last round that ran and
  // those of later rounds that were proposed and may have run. Hosts whose agent is proven to have
  // ended are removed from them. Source: joint consensus (Ongaro, Ousterhout, "In search of an
  // understandable consensus algorithm", 2014).
  std::vector<std::vector<AgentId>> quorums;

  Host* find(AgentId id);
  const Host* find(AgentId id) const;
  size_t num_in(HostState state) const;
  // Returns whether `other` has seen more of the job: a later round, epoch or version.
  bool is_older_than(const Table& other) const;

  friend bool operator==(const Table&, const Table&) = default;
};

// Returns whether workers of the present round run, start or stop.
bool is_active(const Table& table);

// The ranks of the workers of one host in one round, as torchelastic's variables have them.
struct HostRanks {
  uint32_t group_rank = 0;
  uint32_t num_hosts = 0;
  uint32_t local_world_size = 0;
  uint64_t first_rank = 0;
  uint64_t world_size = 0;
  uint64_t first_role_rank = 0;
  uint64_t role_world_size = 0;

  friend bool operator==(const HostRanks&, const HostRanks&) = default;
};

// Returns the ranks of a host that is in the round, else nullopt. Ranks are given in the order of
// node ranks.
std::optional<HostRanks> ranks_of(const Table& table, AgentId host);

// Gives the first `max_hosts` of the table's spare and present hosts a place in the next round.
// Hosts with a wanted rank get it. Present hosts come first and keep their node rank if it is
// smaller than the number of hosts; the others take the smallest free ones. Lost hosts are removed.
void assign_places(Table& table, size_t max_hosts);

// Returns a sentence about two hosts that want one rank, or one that wants a rank which a job with
// this number of hosts does not have; else nullopt.
std::optional<std::string> wrong_wanted_rank(const Table& table, size_t num_hosts);

// The encoding of one host, which a message of an agent has, too. A host that is invalid lets the
// reader fail.
void write_host(wire::ByteWriter& writer, const Host& host);
Host read_host(wire::ByteReader& reader);

std::vector<std::byte> encode(const Table& table);
Result<Table> decode_table(ConstBytes bytes);

std::string_view to_string(Phase phase);

}  // namespace cadre::launch
