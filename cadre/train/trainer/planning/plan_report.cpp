#include "cadre/train/trainer/planning/plan_report.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"

namespace cadre::train {
namespace {

struct HeldColumn {
  const char* key;  // the key in the JSON of plans_json()
  const char* title;
  int64_t HeldBytes::*bytes;
  std::string_view meaning = {};  // empty if the title needs no explanation
};
constexpr std::array<HeldColumn, 7> kHeldColumns{
    HeldColumn{"parameters", "parameters", &HeldBytes::parameters},
    HeldColumn{"gradients", "gradients", &HeldBytes::gradients},
    HeldColumn{"optimizer_state", "optimizer", &HeldBytes::optimizer_state},
    HeldColumn{"full_units", "full units", &HeldBytes::full_units,
               "parameters that are gathered while a unit computes"},
    HeldColumn{"reduction_buffers", "reduction", &HeldBytes::reduction_buffers,
               "buffers in which gradients are reduced"},
    HeldColumn{"transient", "transient", &HeldBytes::transient, "gradients before their reduction"},
    HeldColumn{"buffers", "buffers", &HeldBytes::buffers}};

struct OperationColumn {
  const char* name;
  OperationTraffic StepTraffic::*traffic;
};
constexpr std::array<OperationColumn, 3> kOperations{
    OperationColumn{"all_reduce", &StepTraffic::all_reduce},
    OperationColumn{"reduce_scatter", &StepTraffic::reduce_scatter},
    OperationColumn{"all_gather", &StepTraffic::all_gather}};

struct DivisionColumn {
  const char* name;
  int64_t DivisionTraffic::*bytes;
};
constexpr std::array<DivisionColumn, 4> kDivision{
    DivisionColumn{"tensor", &DivisionTraffic::tensor},
    DivisionColumn{"context", &DivisionTraffic::context},
    DivisionColumn{"pipeline", &DivisionTraffic::pipeline},
    DivisionColumn{"expert", &DivisionTraffic::expert}};

constexpr std::string_view kHeldIs =
    "The memory of a {} at its peak, after the model is constructed, without activations, "
    "data and libraries.\n";
constexpr const char* kReceivedIs =
    "received: by one process in one step, with an optimal algorithm; processes of one host share "
    "memory and copy less.\n";
constexpr const char* kHowToReadDivided =
    "The model is divided: the numbers are those of the process that holds most.\n"
    "in the model: activations and their gradients between the processes of one replica, and the "
    "gradients that\nthose of parallel.context and expert add up.\n";

int64_t received_bytes(const NamedPlan& named) {
  return named.plan.traffic.received_bytes() + named.division.total();
}

std::string megabytes(int64_t num_bytes) {
  const double count = static_cast<double>(num_bytes) / 1e6;
  return cadre::format("{:.{}f}", count, count < 100 && num_bytes > 0 ? 2 : 0);
}

using Rows = std::vector<std::vector<std::string>>;

// Formats rows as a table, with the first column left-aligned and the others right-aligned.
std::string aligned(const Rows& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      text += i == 0 ? row[i] + space : "  " + space + row[i];
    }
    text += '\n';
  }
  return text;
}

bool is_empty_column(std::span<const NamedPlan> plans, const HeldColumn& column) {
  return std::ranges::all_of(
      plans, [&](const NamedPlan& named) { return named.plan.held.*column.bytes == 0; });
}

// Returns the explanation of the table's columns.
std::string legend(std::span<const NamedPlan> plans, bool is_divided) {
  const bool on_devices = !plans.empty() && plans[0].plan.options.is_on_device;
  std::string text = cadre::format(kHeldIs, on_devices ? "process's device" : "process");
  for (const HeldColumn& column : kHeldColumns) {
    if (column.meaning.empty() || is_empty_column(plans, column)) continue;
    text += cadre::format("{}: {}.\n", column.title, column.meaning);
  }
  text += kReceivedIs;
  return is_divided ? text + kHowToReadDivided : text;
}

// Returns the number of processes, for example "2 processes (the row single: 1)".
std::string processes_text(std::span<const NamedPlan> plans, const NamedPlan* chosen) {
  const int count = chosen != nullptr ? chosen->num_processes : 1;
  std::string text = cadre::format("{} {}", count, count == 1 ? "process" : "processes");
  for (const NamedPlan& named : plans) {
    if (named.num_processes == count) continue;
    text += cadre::format(" (the row {}: {})", named.name, named.num_processes);
  }
  return text;
}

bool are_alike(const PlannedPart& a, const PlannedPart& b) {
  return a.numel == b.numel && a.flat_bytes == b.flat_bytes && a.shard_bytes == b.shard_bytes &&
         a.traffic.received_bytes() == b.traffic.received_bytes();
}

// Returns a table with one line for each unit; consecutive equal units have one line together.
std::string parts_table(const MemoryPlan& plan) {
  Rows rows = {{"", "elements", "whole, MB", "own shard, MB", "received, MB"}};
  for (size_t i = 0; i < plan.parts.size();) {
    const PlannedPart& part = plan.parts[i];
    size_t end = i + 1;
    while (end < plan.parts.size() && are_alike(part, plan.parts[end])) ++end;
    const std::string name =
        end - i == 1 ? part.name
                     : cadre::format("{} to {}, each", part.name, plan.parts[end - 1].name);
    if (part.numel > 0) {
      rows.push_back({name, std::to_string(part.numel), megabytes(part.flat_bytes),
                      megabytes(part.shard_bytes), megabytes(part.traffic.received_bytes())});
    }
    i = end;
  }
  return rows.size() == 1 ? "" : aligned(rows);
}

int64_t num_elements(const ModelSizes& model) {
  int64_t count = 0;
  for (const ParameterSize& parameter : model.parameters) count += parameter.numel();
  return count;
}

nlohmann::json json_of(const StepTraffic& traffic) {
  nlohmann::json json = nlohmann::json::object();
  for (const OperationColumn& column : kOperations) {
    const OperationTraffic& operation = traffic.*column.traffic;
    json[column.name] = {{"calls", operation.num_calls},
                         {"payload_bytes", operation.payload_bytes},
                         {"received_bytes", operation.received_bytes}};
  }
  return json;
}

nlohmann::json json_of(const NamedPlan& named) {
  const MemoryPlan& plan = named.plan;
  nlohmann::json held = nlohmann::json::object();
  for (const HeldColumn& column : kHeldColumns) held[column.key] = plan.held.*column.bytes;
  held["total"] = plan.held.total();
  nlohmann::json division = nlohmann::json::object();
  for (const DivisionColumn& column : kDivision) {
    division[column.name] = named.division.*column.bytes;
  }
  nlohmann::json parts = nlohmann::json::array();
  for (const PlannedPart& part : plan.parts) {
    parts.push_back({{"name", part.name},
                     {"elements", part.numel},
                     {"whole_bytes", part.flat_bytes},
                     {"own_bytes", part.shard_bytes},
                     {"traffic", json_of(part.traffic)}});
  }
  return {{"name", named.name},
          {"strategy", to_string(plan.options.strategy)},
          {"is_chosen", named.is_chosen},
          {"processes", named.num_processes},
          {"held_bytes", std::move(held)},
          {"shared_bytes", plan.shared_bytes},
          {"host_bytes", plan.host_bytes},
          {"traffic", json_of(plan.traffic)},
          {"division_bytes", std::move(division)},
          {"parts", std::move(parts)}};
}

}  // namespace

std::string start_table(const NamedPlan& named) {
  const MemoryPlan& plan = named.plan;
  const bool is_divided = named.division.total() > 0;
  Rows rows = {{cadre::format("{}, MB", named.name)},
               {is_divided ? "a process holds at most" : "each process holds"}};
  for (const HeldColumn& column : kHeldColumns) {
    if (plan.held.*column.bytes == 0) continue;
    rows[0].emplace_back(column.title);
    rows[1].push_back(megabytes(plan.held.*column.bytes));
  }
  rows[0].emplace_back("sum");
  rows[1].push_back(megabytes(plan.held.total()));
  std::string text = aligned(rows);
  if (plan.options.num_ranks > 1 || plan.traffic.received_bytes() > 0 || is_divided) {
    Rows moved = {{""}, {"each step receives"}};
    for (const OperationColumn& column : kOperations) {
      const OperationTraffic& traffic = plan.traffic.*column.traffic;
      if (traffic.num_calls == 0) continue;
      moved[0].push_back(cadre::format("{} x {}", traffic.num_calls, column.name));
      moved[1].push_back(megabytes(traffic.received_bytes));
    }
    for (const DivisionColumn& column : kDivision) {
      const int64_t num_bytes = named.division.*column.bytes;
      if (num_bytes == 0) continue;
      moved[0].emplace_back(column.name);
      moved[1].push_back(megabytes(num_bytes));
    }
    moved[0].emplace_back("sum");
    moved[1].push_back(megabytes(received_bytes(named)));
    text += aligned(moved);
  }
  text.pop_back();  // the caller adds the newline
  return text;
}

std::string comparison_table(const Config& config, const ModelSizes& model,
                             std::span<const NamedPlan> plans) {
  Rows rows = {{"MB"}};
  for (const HeldColumn& column : kHeldColumns) {
    if (!is_empty_column(plans, column)) rows[0].emplace_back(column.title);
  }
  for (const char* title : {"process", "host", "all_reduce", "reduce_scatter", "all_gather"}) {
    rows[0].emplace_back(title);
  }
  const bool is_divided =
      std::ranges::any_of(plans, [](const NamedPlan& named) { return named.division.total() > 0; });
  if (is_divided) rows[0].emplace_back("in the model");
  rows[0].emplace_back("received");
  const NamedPlan* chosen = nullptr;
  for (const NamedPlan& named : plans) {
    const MemoryPlan& plan = named.plan;
    if (named.is_chosen) chosen = &named;
    std::vector<std::string> row = {(named.is_chosen ? "* " : "  ") + named.name};
    for (const HeldColumn& column : kHeldColumns) {
      if (!is_empty_column(plans, column)) row.push_back(megabytes(plan.held.*column.bytes));
    }
    row.push_back(megabytes(plan.held.total()));
    row.push_back(megabytes(plan.host_bytes));
    for (const OperationColumn& column : kOperations) {
      row.push_back(megabytes((plan.traffic.*column.traffic).received_bytes));
    }
    if (is_divided) row.push_back(megabytes(named.division.total()));
    row.push_back(megabytes(received_bytes(named)));
    rows.push_back(std::move(row));
  }
  std::string text = cadre::format("{} of {} parameters with {}, run.accumulate={}; {}\n\n",
                                   config.model.kind, num_elements(model), config.optimizer.kind,
                                   config.run.accumulate, processes_text(plans, chosen));
  text += aligned(rows) + "\n" + legend(plans, is_divided);
  if (chosen == nullptr) return text;
  const std::string parts = parts_table(chosen->plan);
  if (!parts.empty()) {
    text += cadre::format("\n{}: the units of communication in one step\n", chosen->name) + parts;
  }
  return text;
}

std::string plans_json(const Config& config, const ModelSizes& model,
                       std::span<const NamedPlan> plans) {
  nlohmann::json strategies = nlohmann::json::array();
  for (const NamedPlan& named : plans) strategies.push_back(json_of(named));
  const nlohmann::json json = {{"model",
                                {{"kind", config.model.kind},
                                 {"parameters", num_elements(model)},
                                 {"units", model.units.size()}}},
                               {"optimizer", config.optimizer.kind},
                               {"accumulate", config.run.accumulate},
                               {"strategies", std::move(strategies)}};
  return json.dump(2) + "\n";
}

}  // namespace cadre::train
