#include "cadre/core/comm/trace/trace.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/comm/failure/diagnosis.h"

namespace cadre {
namespace {

using wire::ActivityState;
using Kind = RankStanding::Kind;

OpKind kind_of(const FlightEntry& entry) {
  return OpDescriptor::from_fingerprint(entry.fingerprint).kind;
}

std::string call_of(const FlightEntry& entry) {
  return OpDescriptor::from_fingerprint(entry.fingerprint).to_string();
}

std::string describe(const FlightIdentity& who) {
  return format("rank {} ({}, pid {})", who.rank, who.host, who.pid);
}

const FlightEntry* find_collective(const FlightRecord& record, uint64_t number) {
  for (const FlightEntry& entry : record.entries) {
    if (!is_message(entry.fingerprint) && entry.number == number) return &entry;
  }
  return nullptr;
}

const FlightEntry* last_collective(const FlightRecord& record) {
  const auto found =
      std::find_if(record.entries.rbegin(), record.entries.rend(),
                   [](const FlightEntry& entry) { return !is_message(entry.fingerprint); });
  return found == record.entries.rend() ? nullptr : &*found;
}

uint64_t last_number(const FlightRecord& record) {
  const FlightEntry* last = last_collective(record);
  return last == nullptr ? 0 : last->number;
}

// Computes the other fields of a trace from its records.
class Analysis {
 public:
  explicit Analysis(GroupTrace& trace) : trace_(trace) {
    for (const FlightRecord& record : trace.records) {
      HostEnd& host = ends_[record.identity.host];
      for (const FlightEntry& entry : record.entries) {
        host.at_ns = std::max({host.at_ns, entry.begin_ns, entry.end_ns});
      }
      if (!record.alive_at) continue;
      host.at_ns = std::max(host.at_ns, record.alive_at->ns);
      host.is_now = true;
    }
  }

  void run() {
    find_stop();
    find_disagreements();
    find_open_messages();
  }

 private:
  struct HostEnd {
    int64_t at_ns = 0;
    bool is_now = false;  // false if it is the time at which the records end
  };

  // Finds the first collective that some rank began and some rank did not finish. A rank has
  // finished a collective that its record, a ring buffer, no longer contains.
  void find_stop() {
    uint64_t last_begun = 0;
    for (const FlightRecord& record : trace_.records) {
      last_begun = std::max(last_begun, last_number(record));
    }
    std::optional<uint64_t> first;
    for (const FlightRecord& record : trace_.records) {
      const std::optional<uint64_t> unfinished = first_unfinished(record, last_begun);
      if (unfinished && (!first || *unfinished < *first)) first = unfinished;
    }
    const bool is_complete = static_cast<int>(trace_.records.size()) == trace_.world_size;
    trace_.stopped_at = first;
    if (!first && is_complete) return;
    if (first) trace_.call = call_of_number(*first);
    for (int rank = 0; rank < trace_.world_size; ++rank) {
      trace_.standings.push_back(standing_of(rank));
    }
    blame_waited_for();
  }

  static std::optional<uint64_t> first_unfinished(const FlightRecord& record, uint64_t last_begun) {
    for (const FlightEntry& entry : record.entries) {
      if (!is_message(entry.fingerprint) && entry.state != ActivityState::kDone)
        return entry.number;
    }
    const uint64_t last = last_number(record);
    return last < last_begun ? std::optional(last + 1) : std::nullopt;
  }

  std::string call_of_number(uint64_t number) const {
    for (const FlightRecord& record : trace_.records) {
      if (const FlightEntry* entry = find_collective(record, number)) return call_of(*entry);
    }
    return "a collective";
  }

  const FlightRecord* record_of(int rank) const {
    const auto found =
        std::find_if(trace_.records.begin(), trace_.records.end(),
                     [rank](const FlightRecord& record) { return record.identity.rank == rank; });
    return found == trace_.records.end() ? nullptr : &*found;
  }

  RankStanding standing_of(int rank) const {
    const FlightRecord* record = record_of(rank);
    if (record == nullptr) {
      return {rank, Kind::kNoRecord, format("rank {}", rank), "left no record"};
    }
    const std::string who = describe(record->identity);
    if (!trace_.stopped_at) return {rank, Kind::kFinished, who, "finished all it began"};
    const FlightEntry* entry = find_collective(*record, *trace_.stopped_at);
    if (entry == nullptr && last_number(*record) < *trace_.stopped_at) {
      return {rank, Kind::kOwing, who, "did not call it: " + last_seen(*record)};
    }
    if (entry == nullptr || entry->state == ActivityState::kDone) {
      return {rank, Kind::kFinished, who, "finished it"};
    }
    return {rank, Kind::kWaiting, who, waiting_text(*record, *entry)};
  }

  std::string last_seen(const FlightRecord& record) const {
    const FlightEntry* last = last_collective(record);
    if (last == nullptr) return "it called no collective";
    const int64_t at = std::max(last->begin_ns, last->end_ns);
    const HostEnd& host = ends_.at(record.identity.host);
    return format("last seen after {}, {} {}", describe_operation(last->number, last->fingerprint),
                  describe_duration(Duration(host.at_ns - at)),
                  host.is_now ? "ago" : "before the records end");
  }

  std::string waiting_text(const FlightRecord& record, const FlightEntry& entry) const {
    const bool has_failed = entry.state == ActivityState::kFailed;
    const int64_t end = has_failed ? entry.end_ns : ends_.at(record.identity.host).at_ns;
    const std::string duration = describe_duration(Duration(end - entry.begin_ns));
    std::string text = has_failed        ? format("was in it for {}, then failed", duration)
                       : record.alive_at ? format("was still in it after {}", duration)
                                         : "was in it when its record ends";
    if (!entry.phase.empty()) text += format(" in \"{}\"", entry.phase);
    if (entry.peer >= 0) text += format(", waiting for rank {}", entry.peer);
    return text;
  }

  // If other ranks waited for a rank that was inside the collective, too, that rank was probably
  // stopped or killed there and is marked as kOwing. This is done only if no rank is marked as
  // kOwing yet.
  void blame_waited_for() {
    if (!trace_.stopped_at) return;
    const bool is_plain = std::any_of(
        trace_.standings.begin(), trace_.standings.end(),
        [](const RankStanding& s) { return s.kind == Kind::kOwing || s.kind == Kind::kNoRecord; });
    if (is_plain) return;
    std::set<int> waited_for;
    for (const FlightRecord& record : trace_.records) {
      const FlightEntry* entry = find_collective(record, *trace_.stopped_at);
      if (entry != nullptr && entry->peer >= 0) waited_for.insert(entry->peer);
    }
    for (RankStanding& standing : trace_.standings) {
      const FlightRecord* record = record_of(standing.rank);
      const FlightEntry* entry = find_collective(*record, *trace_.stopped_at);
      const bool never_failed = entry != nullptr && entry->state == ActivityState::kRunning;
      if (waited_for.contains(standing.rank) && never_failed) {
        standing.kind = Kind::kOwing;
        standing.text = "entered it and did not end it: killed or stopped there?";
      }
    }
  }

  void find_disagreements() {
    struct Call {
      const FlightRecord* record;
      const FlightEntry* entry;
    };
    std::map<uint64_t, Call> first_calls;
    for (const FlightRecord& record : trace_.records) {
      for (const FlightEntry& entry : record.entries) {
        if (is_message(entry.fingerprint)) continue;
        const auto [first, is_new] = first_calls.try_emplace(entry.number, Call{&record, &entry});
        if (is_new || first->second.entry->fingerprint == entry.fingerprint) continue;
        trace_.disagreements.push_back(format("#{}: {} called {}, {} called {}", entry.number,
                                              describe(first->second.record->identity),
                                              call_of(*first->second.entry),
                                              describe(record.identity), call_of(entry)));
      }
    }
  }

  void find_open_messages() {
    for (const FlightRecord& record : trace_.records) {
      for (const FlightEntry& entry : record.entries) {
        if (!is_message(entry.fingerprint) || entry.state == ActivityState::kDone) continue;
        const bool is_send = kind_of(entry) == OpKind::kSend;
        trace_.open_messages.push_back(
            format("{}: {} {} rank {} {}; {}", describe(record.identity), call_of(entry),
                   is_send ? "to" : "from", entry.peer,
                   entry.state == ActivityState::kFailed ? "failed" : "was not done",
                   counterpart(record.identity.rank, entry)));
      }
    }
  }

  // Returns text about the message that the other rank had pending with this rank.
  std::string counterpart(int rank, const FlightEntry& entry) const {
    const FlightRecord* peer = record_of(entry.peer);
    if (peer == nullptr) return format("rank {} left no record", entry.peer);
    if (kind_of(entry) == OpKind::kWaitSignal) return format("rank {} owes the signal", entry.peer);
    const OpKind wanted = kind_of(entry) == OpKind::kSend ? OpKind::kRecv : OpKind::kSend;
    for (const FlightEntry& other : peer->entries) {
      if (kind_of(other) == wanted && other.peer == rank && other.state != ActivityState::kDone) {
        return format("rank {} had {} open with it: another tag, type or size?", entry.peer,
                      call_of(other));
      }
    }
    return format("rank {} owes the {}", entry.peer, wanted);
  }

  GroupTrace& trace_;
  std::map<std::string, HostEnd> ends_;
};

int64_t begin_of(const FlightRecord& record) {
  return record.entries.empty() ? 0 : record.entries.front().begin_ns;
}

}  // namespace

std::vector<GroupTrace> trace_groups(std::vector<FlightRecord> records) {
  // The key includes the number of the connection, because two groups may have equal names, ids and
  // rounds.
  using Key = std::tuple<std::string, std::string, uint64_t, uint64_t>;
  std::map<Key, std::map<int, FlightRecord>> groups;
  for (FlightRecord& record : records) {
    const FlightIdentity& who = record.identity;
    auto& ranks =
        groups[{who.group, who.id.empty() ? who.group : who.id, who.round, who.connection}];
    const auto found = ranks.find(who.rank);
    if (found != ranks.end() && begin_of(found->second) >= begin_of(record)) continue;
    ranks[who.rank] = std::move(record);
  }
  std::vector<GroupTrace> traces;
  for (auto& [key, ranks] : groups) {
    GroupTrace trace;
    std::tie(trace.group, trace.id, trace.round, std::ignore) = key;
    for (auto& [rank, record] : ranks) {
      trace.world_size = std::max({trace.world_size, record.identity.world_size, rank + 1});
      trace.records.push_back(std::move(record));
    }
    Analysis(trace).run();
    traces.push_back(std::move(trace));
  }
  return traces;
}

}  // namespace cadre
