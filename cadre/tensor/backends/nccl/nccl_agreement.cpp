#include "cadre/tensor/backends/nccl/nccl_agreement.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <string_view>
#include <vector>

#include "cadre/core/base/format.h"

namespace cadre::nccl {
namespace {

constexpr Duration kStoreLookTime = std::chrono::milliseconds(100);
// The time in which the store must answer a question that it need not wait for.
constexpr Duration kAnswerTime = std::chrono::seconds(2);
constexpr std::string_view kDecisionKey = "decision";
constexpr std::string_view kFailureKey = "failure";
constexpr char kYes = 'y';
constexpr char kNo = 'n';
constexpr char kError = 'e';

std::string key_of(int rank) {
  return format("rank/{}", rank);
}

// Waits for keys of other ranks.
Result<std::vector<std::string>> await(const BackendSetup& setup, Deadline deadline,
                                       const std::vector<std::string>& keys) {
  while (true) {
    auto found =
        setup.store->multi_get(keys, deadline.earlier(setup.system.deadline_in(kStoreLookTime)));
    if (found.ok() || found.error().code() != ErrorCode::kTimeout) return found;
    if (setup.interrupt.is_raised()) return Error(ErrorCode::kAborted, "the group has failed");
    if (deadline.has_passed(setup.system.now())) return found;
  }
}

Error absent(int rank) {
  return Error(ErrorCode::kTimeout,
               format("rank {} does not choose an engine for a device, as this rank does: let all "
                      "ranks have a device (InitOptions::device), or none",
                      rank));
}

// Returns the first rank without a readiness; the last rank if all have one.
int first_absent(const BackendSetup& setup) {
  int rank = 0;
  for (; rank + 1 < setup.world_size; ++rank) {
    const std::vector<std::string> keys = {key_of(rank)};
    const auto is_set = setup.store->check(keys, setup.system.deadline_in(kAnswerTime));
    if (is_set.ok() && !*is_set) break;
  }
  return rank;
}

// A readiness has five lines: the choice, why_not, the version, and the name and key of the device.
std::string encoded(const Readiness& own) {
  std::string why_not = own.why_not;
  std::ranges::replace(why_not, '\n', ' ');
  return format("{}\n{}\n{}\n{}\n{}", own.choice, why_not, own.version, own.device.name,
                own.device.key);
}

Readiness decoded(const std::string& text) {
  std::array<std::string, 5> lines;
  size_t begin = 0;
  for (std::string& line : lines) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    line = text.substr(begin, end - begin);
    begin = std::min(end + 1, text.size());
  }
  return {.choice = lines[0],
          .why_not = lines[1],
          .version = lines[2],
          .device = {.name = lines[3], .key = lines[4]}};
}

Result<std::string> decide(const BackendSetup& setup, Deadline deadline, SharedDevices shared,
                           const std::function<Result<UniqueId>()>& make_id) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < setup.world_size; ++rank) keys.push_back(key_of(rank));
  const auto values = await(setup, deadline, keys);
  if (!values.ok() && values.error().code() == ErrorCode::kTimeout) {
    return kError + absent(first_absent(setup)).message();
  }
  if (!values.ok()) return values.error();
  std::vector<Readiness> ranks;
  for (const std::string& value : *values) ranks.push_back(decoded(value));
  const std::string why_differ = why_choices_differ(ranks);
  if (!why_differ.empty()) return kError + why_differ;
  const std::string why_not = why_not_together(ranks, shared);
  if (!why_not.empty()) return kNo + why_not;
  const Result<UniqueId> id = make_id();
  if (!id.ok()) return kNo + id.error().message();
  return kYes + std::string(id->bytes, sizeof(id->bytes));
}

Result<Decision> decision_of(const std::string& text) {
  Decision decision;
  if (text.starts_with(kError)) return Error(ErrorCode::kInvalidArgument, text.substr(1));
  if (!text.starts_with(kYes)) {
    decision.why_not = text.empty() ? "no reason" : text.substr(1);
  } else if (text.size() == 1 + sizeof(decision.id.bytes)) {
    std::memcpy(decision.id.bytes, text.data() + 1, sizeof(decision.id.bytes));
  } else {
    return Error(ErrorCode::kCorruption,
                 format("the id of NCCL's communicator has {} bytes instead of {}: let all ranks "
                        "run the same build",
                        text.size() - 1, sizeof(decision.id.bytes)));
  }
  return decision;
}

}  // namespace

std::string why_choices_differ(std::span<const Readiness> ranks) {
  const std::string& first = ranks.front().choice;
  const auto other =
      std::ranges::find_if(ranks, [&](const Readiness& rank) { return rank.choice != first; });
  if (other == ranks.end()) return {};
  return format("rank 0 passes {} and rank {} passes {}; pass one on all ranks", first,
                other - ranks.begin(), other->choice);
}

std::string why_not_together(std::span<const Readiness> ranks, SharedDevices shared) {
  std::map<device::DeviceIdentity, size_t> owners;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const Readiness& has = ranks[rank];
    if (!has.why_not.empty()) return format("rank {}: {}", rank, has.why_not);
    if (has.version != ranks.front().version) {
      return format("rank {} has NCCL {} and rank 0 has NCCL {}; use one version on all ranks",
                    rank, has.version, ranks.front().version);
    }
    if (shared == SharedDevices::kLeftToNccl) continue;
    const auto [owner, is_first] = owners.emplace(has.device, rank);
    if (is_first) continue;
    return format(
        "ranks {} and {} share the device {}, and NCCL needs a device of its own for each "
        "rank",
        owner->second, rank, has.device.name);
  }
  return {};
}

Result<Decision> agree(const BackendSetup& setup, const Readiness& own, SharedDevices shared,
                       const std::function<Result<UniqueId>()>& make_id) {
  if (setup.store == nullptr || setup.world_size == 1) {
    const std::array<Readiness, 1> alone = {own};
    Decision decision{.why_not = why_not_together(alone, shared)};
    if (!decision.why_not.empty()) return decision;
    const Result<UniqueId> id = make_id();
    if (!id.ok()) return Decision{.why_not = id.error().message()};
    decision.id = *id;
    return decision;
  }
  CADRE_RETURN_IF_ERROR(setup.store->set(key_of(setup.rank.value), encoded(own), setup.deadline));
  const Deadline deadline = setup.deadline.earlier(setup.system.deadline_in(kAgreeTime));
  if (setup.rank != 0) {
    // Rank 0 reports at the deadline which rank is absent.
    const auto text =
        await(setup, setup.deadline.earlier(setup.system.deadline_in(kAgreeTime + kAnswerTime)),
              {std::string(kDecisionKey)});
    if (!text.ok() && text.error().code() == ErrorCode::kTimeout) return absent(0);
    if (!text.ok()) return text.error();
    return decision_of(text->front());
  }
  const Result<std::string> decided = decide(setup, deadline, shared, make_id);
  if (!decided.ok()) return decided.error();
  CADRE_RETURN_IF_ERROR(setup.store->set(kDecisionKey, *decided, setup.deadline));
  return decision_of(*decided);
}

void report_failure(const BackendSetup& setup, const std::string& text) {
  if (setup.store == nullptr) return;
  static_cast<void>(
      setup.store->compare_set(kFailureKey, "", text, setup.system.deadline_in(kAnswerTime)));
}

std::optional<std::string> reported_failure(const BackendSetup& setup) {
  if (setup.store == nullptr) return std::nullopt;
  const std::vector<std::string> keys = {std::string(kFailureKey)};
  const auto is_set = setup.store->check(keys, setup.system.deadline_in(kAnswerTime));
  if (!is_set.ok() || !*is_set) return std::nullopt;
  auto text = setup.store->get(kFailureKey, setup.system.deadline_in(kAnswerTime));
  return text.ok() ? std::optional(std::move(text).value()) : std::nullopt;
}

}  // namespace cadre::nccl
