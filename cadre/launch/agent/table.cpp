#include "cadre/launch/agent/table.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <unordered_set>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::launch {
namespace {

constexpr uint32_t kTableMagic = 0x54484443;  // "CDHT"
constexpr uint32_t kTableFormat = 2;
constexpr uint32_t kNoNodeRank = UINT32_MAX;

std::optional<uint32_t> read_node_rank(wire::ByteReader& reader) {
  const auto rank = reader.integer<uint32_t>();
  if (rank == kNoNodeRank) return std::nullopt;
  if (rank >= Table::kMaxHosts) reader.fail();
  return rank;
}

std::vector<AgentId> read_quorum(wire::ByteReader& reader) {
  std::vector<AgentId> quorum;
  const auto size = reader.integer<uint32_t>();
  if (size > Table::kMaxHosts) reader.fail();
  for (uint32_t i = 0; i < size && reader.ok(); ++i) {
    quorum.push_back(reader.integer<uint64_t>());
  }
  return quorum;
}

// Two hosts with one id or two present hosts with one node rank would give two workers one rank.
bool has_distinct_hosts(const Table& table) {
  std::unordered_set<AgentId> ids;
  std::unordered_set<uint32_t> node_ranks;
  for (const Host& host : table.hosts) {
    if (!ids.insert(host.id).second) return false;
    if (host.state != HostState::kIn) continue;
    if (!host.node_rank || !node_ranks.insert(*host.node_rank).second) return false;
  }
  return true;
}

}  // namespace

Host* Table::find(AgentId id) {
  const auto at = std::ranges::find(hosts, id, &Host::id);
  return at == hosts.end() ? nullptr : &*at;
}

const Host* Table::find(AgentId id) const {
  const auto at = std::ranges::find(hosts, id, &Host::id);
  return at == hosts.end() ? nullptr : &*at;
}

size_t Table::num_in(HostState state) const {
  return static_cast<size_t>(std::ranges::count(hosts, state, &Host::state));
}

bool Table::is_older_than(const Table& other) const {
  return std::tie(round, epoch, version) < std::tie(other.round, other.epoch, other.version);
}

bool is_active(const Table& table) {
  return table.phase == Phase::kStarting || table.phase == Phase::kRunning ||
         table.phase == Phase::kDraining;
}

std::optional<HostRanks> ranks_of(const Table& table, AgentId id) {
  const Host* self = table.find(id);
  if (self == nullptr || self->state != HostState::kIn || !self->node_rank) return std::nullopt;
  HostRanks ranks{.local_world_size = self->num_slots};
  for (const Host& host : table.hosts) {
    if (host.state != HostState::kIn) continue;
    const bool is_before = *host.node_rank < *self->node_rank;
    const bool has_role = host.role == self->role;
    ++ranks.num_hosts;
    ranks.world_size += host.num_slots;
    if (has_role) ranks.role_world_size += host.num_slots;
    if (!is_before) continue;
    ++ranks.group_rank;
    ranks.first_rank += host.num_slots;
    if (has_role) ranks.first_role_rank += host.num_slots;
  }
  return ranks;
}

void assign_places(Table& table, size_t max_hosts) {
  std::erase_if(table.hosts, [](const Host& host) { return host.state == HostState::kLost; });
  std::ranges::stable_partition(table.hosts,
                                [](const Host& host) { return host.state == HostState::kIn; });
  const size_t num_hosts = std::min(max_hosts, table.hosts.size());
  std::vector<bool> is_taken(num_hosts, false);
  for (const Host& host : table.hosts) {
    if (host.wanted_rank && *host.wanted_rank < num_hosts) is_taken[*host.wanted_rank] = true;
  }
  for (size_t i = 0; i < table.hosts.size(); ++i) {
    Host& host = table.hosts[i];
    host.state = i < num_hosts ? HostState::kIn : HostState::kSpare;
    if (host.wanted_rank) {
      host.node_rank = host.wanted_rank;
      continue;
    }
    const bool keeps_rank = i < num_hosts && host.node_rank && *host.node_rank < num_hosts &&
                            !is_taken[*host.node_rank];
    if (keeps_rank) {
      is_taken[*host.node_rank] = true;
    } else {
      host.node_rank.reset();
    }
  }
  uint32_t free_rank = 0;
  for (Host& host : table.hosts) {
    if (host.state != HostState::kIn || host.node_rank) continue;
    while (is_taken[free_rank]) ++free_rank;
    host.node_rank = free_rank++;
  }
}

std::optional<std::string> wrong_wanted_rank(const Table& table, size_t num_hosts) {
  std::map<uint32_t, const Host*> host_of;
  for (const Host& host : table.hosts) {
    if (!host.wanted_rank || host.state == HostState::kLost) continue;
    if (*host.wanted_rank >= num_hosts) {
      return cadre::format("host {} has --node-rank {}, and the job has {} hosts, 0 to {}",
                           host.name, *host.wanted_rank, num_hosts, num_hosts - 1);
    }
    const auto [at, is_new] = host_of.emplace(*host.wanted_rank, &host);
    if (!is_new) {
      return cadre::format(
          "hosts {} ({}) and {} ({}) both have --node-rank {}; give each host a "
          "rank of its own",
          at->second->name, at->second->address, host.name, host.address, *host.wanted_rank);
    }
  }
  return std::nullopt;
}

void write_host(wire::ByteWriter& writer, const Host& host) {
  writer.integer(host.id);
  writer.text<uint16_t>(host.name);
  writer.text<uint16_t>(host.address);
  writer.text<uint16_t>(host.role);
  writer.integer(host.num_slots);
  writer.integer(host.state);
  writer.integer(host.wanted_rank.value_or(kNoNodeRank));
  writer.integer(host.node_rank.value_or(kNoNodeRank));
}

Host read_host(wire::ByteReader& reader) {
  Host host;
  host.id = reader.integer<uint64_t>();
  host.name = reader.text<uint16_t>(Table::kMaxTextBytes);
  host.address = reader.text<uint16_t>(Table::kMaxTextBytes);
  host.role = reader.text<uint16_t>(Table::kMaxTextBytes);
  host.num_slots = reader.integer<uint32_t>();
  const auto state = reader.integer<uint8_t>();
  host.wanted_rank = read_node_rank(reader);
  host.node_rank = read_node_rank(reader);
  const bool is_valid = host.id != 0 && host.num_slots > 0 && host.num_slots <= Table::kMaxSlots &&
                        state < kNumHostStates;
  if (!is_valid) reader.fail();
  host.state = static_cast<HostState>(state);
  return host;
}

std::vector<std::byte> encode(const Table& table) {
  wire::ByteWriter writer;
  writer.integer(kTableMagic);
  writer.integer(kTableFormat);
  writer.text<uint16_t>(table.job);
  writer.integer(table.epoch);
  writer.integer(table.version);
  writer.integer(table.round);
  writer.integer(table.phase);
  writer.integer(table.coordinator);
  writer.integer(table.restarts_used);
  writer.integer(table.first_coordinator);
  writer.text<uint16_t>(table.reason);
  writer.integer(static_cast<uint32_t>(table.hosts.size()));
  for (const Host& host : table.hosts) write_host(writer, host);
  writer.integer(static_cast<uint32_t>(table.quorums.size()));
  for (const auto& quorum : table.quorums) {
    writer.integer(static_cast<uint32_t>(quorum.size()));
    for (const AgentId id : quorum) writer.integer(id);
  }
  return writer.take();
}

Result<Table> decode_table(ConstBytes bytes) {
  wire::ByteReader reader(bytes);
  const auto magic = reader.integer<uint32_t>();
  const auto format = reader.integer<uint32_t>();
  if (magic != kTableMagic || format != kTableFormat) {
    return Error(
        ErrorCode::kCorruption,
        cadre::format("the {} bytes are no table of hosts in format {}: they begin with "
                      "{:#x} and format {}; start all hosts with the same version of cadre",
                      bytes.size(), kTableFormat, magic, format));
  }
  Table table;
  table.job = reader.text<uint16_t>(Table::kMaxTextBytes);
  table.epoch = reader.integer<uint64_t>();
  table.version = reader.integer<uint64_t>();
  table.round = reader.integer<uint64_t>();
  const auto phase = reader.integer<uint8_t>();
  if (phase >= kNumPhases) reader.fail();
  table.phase = static_cast<Phase>(phase);
  table.coordinator = reader.integer<uint64_t>();
  table.restarts_used = reader.integer<uint32_t>();
  table.first_coordinator = reader.integer<uint64_t>();
  table.reason = reader.text<uint16_t>(Table::kMaxTextBytes);
  const auto num_hosts = reader.integer<uint32_t>();
  if (num_hosts > Table::kMaxHosts) reader.fail();
  for (uint32_t i = 0; i < num_hosts && reader.ok(); ++i) table.hosts.push_back(read_host(reader));
  const auto num_quorums = reader.integer<uint32_t>();
  if (num_quorums > Table::kMaxQuorums) reader.fail();
  for (uint32_t i = 0; i < num_quorums && reader.ok(); ++i) {
    table.quorums.push_back(read_quorum(reader));
  }
  if (!reader.is_complete() || !has_distinct_hosts(table)) {
    return Error(ErrorCode::kCorruption,
                 cadre::format("the table of hosts is invalid at byte {} of {}: a field is out of "
                               "range, two hosts have one id or rank, or bytes are missing or left",
                               reader.offset(), bytes.size()));
  }
  return table;
}

std::string_view to_string(Phase phase) {
  constexpr std::array<std::string_view, kNumPhases> kNames = {"gathering", "starting", "running",
                                                               "draining",  "done",     "failed"};
  return kNames[static_cast<size_t>(phase)];
}

}  // namespace cadre::launch
