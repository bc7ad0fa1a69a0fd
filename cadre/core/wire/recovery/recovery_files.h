// The three files by which a rank that keeps its process after a failure and its launcher talk: the
// rank says whether it waits for a new membership; the launcher names the ranks whose hosts it has
// lost, and gives the rank a new membership.
//
// Threads: pure functions. Blocking: never. Errors: a text in another format gives nullopt.
// Format: docs/formats/recovery-files.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/export.h"

namespace cadre {

// Names the rank's file, which the rank writes. The launcher's files have this name with
// kMembershipFileSuffix and kLostRanksFileSuffix appended.
inline constexpr const char* kRecoveryVariable = "CADRE_RECOVERY_FILE";
inline constexpr std::string_view kMembershipFileSuffix = ".membership";
inline constexpr std::string_view kLostRanksFileSuffix = ".lost";
inline constexpr size_t kMaxRecoveryFileBytes = 256;
inline constexpr size_t kMaxMembershipFileBytes = 8192;
inline constexpr size_t kMaxLostRanksFileBytes = size_t{1} << 20;

// The variables whose values a membership file has. Those of the process keep the values with which
// it was started.
inline constexpr std::array<std::string_view, 12> kMembershipVariables = {
    "RANK",
    "LOCAL_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "CADRE_ATTEMPT"};

struct RecoveryFile {
  bool is_waiting = false;
  uint64_t num_memberships = 0;  // how many memberships the rank has read
  // How long after a failure the rank comes to wait at the latest; 0: it does not recover.
  std::chrono::milliseconds comes_within{};

  friend bool operator==(const RecoveryFile&, const RecoveryFile&) = default;
};

struct MembershipFile {
  uint64_t number = 0;  // 1 for the first one that the process gets
  std::vector<std::pair<std::string, std::string>> variables;

  // Returns the value of the variable; nullopt if the file does not have it.
  std::optional<std::string> find(std::string_view name) const;

  friend bool operator==(const MembershipFile&, const MembershipFile&) = default;
};

// The ranks first, first + 1, ..., last.
struct RankRange {
  int first = 0;
  int last = 0;

  friend bool operator==(const RankRange&, const RankRange&) = default;
};

struct LostRanksFile {
  // How many memberships the process had got when the round began. The numbers of ranks are those
  // of that membership.
  uint64_t num_memberships = 0;
  std::vector<RankRange> ranks;  // not empty; ascending

  friend bool operator==(const LostRanksFile&, const LostRanksFile&) = default;
};

CADRE_EXPORT std::string encode_recovery_file(const RecoveryFile& file);
CADRE_EXPORT std::optional<RecoveryFile> parse_recovery_file(std::string_view text);

// REQUIRES: the names are in kMembershipVariables, and no value has a newline.
CADRE_EXPORT std::string encode_membership_file(const MembershipFile& file);
CADRE_EXPORT std::optional<MembershipFile> parse_membership_file(std::string_view text);

CADRE_EXPORT std::string encode_lost_ranks_file(const LostRanksFile& file);
CADRE_EXPORT std::optional<LostRanksFile> parse_lost_ranks_file(std::string_view text);

}  // namespace cadre
