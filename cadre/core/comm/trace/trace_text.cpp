#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/comm/failure/diagnosis.h"
#include "cadre/core/comm/trace/trace.h"

namespace cadre {
namespace {

using wire::ActivityState;

std::string_view name_of(RankStanding::Kind kind) {
  constexpr std::array<std::string_view, 4> kNames = {"finished", "waited", "owes", "no record"};
  return kNames[static_cast<size_t>(kind)];
}

// Returns text such as "0-2, 5".
std::string list_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    text += format("{}{}", text.empty() ? "" : ", ", ranks[i]);
    if (end - i > 1) text += format("-{}", ranks[end - 1]);
    i = end;
  }
  return text;
}

std::string_view plural_s(size_t count) {
  return count == 1 ? "" : "s";
}

std::string title(const GroupTrace& trace) {
  std::set<std::string> hosts;
  std::vector<int> ranks;
  for (const FlightRecord& record : trace.records) {
    hosts.insert(record.identity.host);
    ranks.push_back(record.identity.rank);
  }
  const std::string id = trace.id == trace.group ? "" : format(" ({})", trace.id);
  return format("group \"{}\"{}, round {}: {} rank{}; record{} of rank{} {} on {} host{}\n",
                trace.group, id, trace.round, trace.world_size,
                plural_s(static_cast<size_t>(trace.world_size)), plural_s(ranks.size()),
                plural_s(ranks.size()), list_ranks(ranks), hosts.size(), plural_s(hosts.size()));
}

std::string verdict(const GroupTrace& trace) {
  std::string text;
  if (trace.stopped_at) {
    text += format("  stopped at #{} {}\n", *trace.stopped_at, trace.call);
  } else {
    text += "  every rank with a record finished every collective that any of them began\n";
  }
  for (const RankStanding& standing : trace.standings) {
    text += format("    {:<10} {}: {}\n", name_of(standing.kind), standing.who, standing.text);
  }
  for (const std::string& sentence : trace.disagreements) {
    text += format("  the ranks disagree: {}\n", sentence);
  }
  for (const std::string& sentence : trace.open_messages) {
    text += format("  message: {}\n", sentence);
  }
  return text;
}

// A row of the table: the time at which each rank entered one collective, and how long it was
// inside.
struct Row {
  std::string call;
  std::map<int, const FlightEntry*> entries;
  std::map<std::string, int64_t> first_of_host;
};

std::map<uint64_t, Row> make_rows(const GroupTrace& trace) {
  std::map<uint64_t, Row> rows;
  for (const FlightRecord& record : trace.records) {
    for (const FlightEntry& entry : record.entries) {
      if (is_message(entry.fingerprint)) continue;
      Row& row = rows[entry.number];
      if (row.call.empty()) {
        row.call = OpDescriptor::from_fingerprint(entry.fingerprint).to_string();
      }
      row.entries[record.identity.rank] = &entry;
      const auto [first, is_new] =
          row.first_of_host.try_emplace(record.identity.host, entry.begin_ns);
      if (!is_new) first->second = std::min(first->second, entry.begin_ns);
    }
  }
  return rows;
}

std::string milliseconds(int64_t ns) {
  return format("{:.3f}", static_cast<double>(ns) * 1e-6);
}

std::string cell(const Row& row, const FlightIdentity& who) {
  const auto found = row.entries.find(who.rank);
  if (found == row.entries.end()) return "-";
  const FlightEntry& entry = *found->second;
  const std::string begin = milliseconds(entry.begin_ns - row.first_of_host.at(who.host));
  if (entry.state == ActivityState::kRunning) return format("+{} running", begin);
  return format("+{} {}{}", begin, milliseconds(entry.end_ns - entry.begin_ns),
                entry.state == ActivityState::kFailed ? " failed" : "");
}

std::string table(const GroupTrace& trace, size_t num_operations) {
  constexpr int kCallWidth = 40;
  constexpr int kCellWidth = 24;
  const std::map<uint64_t, Row> rows = make_rows(trace);
  if (rows.empty() || num_operations == 0) return "";
  const size_t num_shown = std::min(num_operations, rows.size());
  const std::string which = num_shown == 1 ? "collective" : format("{} collectives", num_shown);
  std::string text = format(
      "  the last {}; for each rank, in ms: how much later than the first rank of its host it "
      "entered, and how long it was inside\n    {:<9}{:<{}}",
      which, "number", "call", kCallWidth);
  for (const FlightRecord& record : trace.records) {
    text += format("{:<{}}", format("rank {}", record.identity.rank), kCellWidth);
  }
  const size_t num_left_out = rows.size() - num_shown;
  for (auto row = std::next(rows.begin(), static_cast<std::ptrdiff_t>(num_left_out));
       row != rows.end(); ++row) {
    text += format("\n    {:<9}{:<{}}", format("#{}", row->first), row->second.call, kCallWidth);
    for (const FlightRecord& record : trace.records) {
      text += format("{:<{}}", cell(row->second, record.identity), kCellWidth);
    }
  }
  return text + "\n";
}

}  // namespace

std::string to_text(const GroupTrace& trace, size_t num_operations) {
  return title(trace) + verdict(trace) + table(trace, num_operations);
}

std::string to_json(const std::vector<GroupTrace>& traces) {
  nlohmann::ordered_json array = nlohmann::ordered_json::array();
  for (const GroupTrace& trace : traces) {
    nlohmann::ordered_json json = {{"group", trace.group},
                                   {"id", trace.id},
                                   {"round", trace.round},
                                   {"world_size", trace.world_size}};
    json["stopped_at"] = trace.stopped_at ? nlohmann::ordered_json(*trace.stopped_at) : nullptr;
    json["call"] = trace.call;
    for (const RankStanding& standing : trace.standings) {
      json["standings"].push_back({{"rank", standing.rank},
                                   {"standing", std::string(name_of(standing.kind))},
                                   {"text", standing.text}});
    }
    json["disagreements"] = trace.disagreements;
    json["open_messages"] = trace.open_messages;
    for (const FlightRecord& record : trace.records) {
      json["records"].push_back(nlohmann::ordered_json::parse(to_json(record)));
    }
    array.push_back(std::move(json));
  }
  return array.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace cadre
