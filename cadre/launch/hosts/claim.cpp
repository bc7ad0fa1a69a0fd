#include "cadre/launch/hosts/claim.h"

#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/core/os/socket.h"

namespace cadre::launch {
namespace {

constexpr std::string_view kFormat = "cadre-coordinator";
constexpr uint64_t kVersion = 1;

std::optional<AgentId> parse_agent(const std::string& text) {
  AgentId id = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, id, 16);
  if (text.size() != 16 || parsed.ec != std::errc() || parsed.ptr != end || id == 0) {
    return std::nullopt;
  }
  return id;
}

bool is_address(const std::string& text) {
  if (text.size() > Table::kMaxTextBytes) return false;
  const auto address = os::Address::parse("tcp:" + text);
  return address.ok() && !address->host.empty() && address->port != 0;
}

template <typename T>
std::optional<T> member(const nlohmann::json& json, const char* name) {
  const auto at = json.find(name);
  if (at == json.end()) return std::nullopt;
  if constexpr (std::is_same_v<T, std::string>) {
    if (!at->is_string()) return std::nullopt;
  } else {
    if (!at->is_number_unsigned()) return std::nullopt;
  }
  return at->get<T>();
}

}  // namespace

bool replaces(const Claim& own, const Claim& other) {
  return own.agent == other.agent ||
         (own.round > 0 && std::tuple(own.round, own.epoch) > std::tuple(other.round, other.epoch));
}

std::string encode_claim(std::string_view job, const Claim& claim) {
  const nlohmann::ordered_json json = {{"format", kFormat},
                                       {"version", kVersion},
                                       {"job", job},
                                       {"agent", cadre::format("{:016x}", claim.agent)},
                                       {"epoch", claim.epoch},
                                       {"round", claim.round},
                                       {"address", claim.address}};
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Result<Claim> decode_claim(std::string_view job, std::string_view text, std::string_view place) {
  const auto refuse = [&](ErrorCode code, std::string_view what) {
    return Error(code, cadre::format("{} {}", place, what));
  };
  const auto garbage = [&] {
    return refuse(ErrorCode::kCorruption,
                  cadre::format("holds something else than the coordinator of a job, \"{}\"; "
                                "remove it, or give the job another --rdzv-id",
                                printable(text.substr(0, 60))));
  };
  if (text.size() > Claim::kMaxTextBytes) return garbage();
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || member<std::string>(json, "format") != kFormat) return garbage();
  const auto version = member<uint64_t>(json, "version");
  if (!version) return garbage();
  if (*version != kVersion) {
    return refuse(ErrorCode::kCorruption,
                  cadre::format("has version {} of the format, but this cadre reads version {}; "
                                "run one version of cadre on all hosts",
                                *version, kVersion));
  }
  const auto owner = member<std::string>(json, "job");
  const auto agent = parse_agent(member<std::string>(json, "agent").value_or(""));
  const auto epoch = member<uint64_t>(json, "epoch");
  const auto round = member<uint64_t>(json, "round");
  auto address = member<std::string>(json, "address");
  if (!owner || !agent || !epoch || !round || !address || !is_address(*address)) return garbage();
  if (*owner != job) {
    return refuse(
        ErrorCode::kInvalidArgument,
        cadre::format("belongs to job \"{}\", not to \"{}\"; give each job a place of its own",
                      printable(*owner), job));
  }
  return Claim{.agent = *agent, .epoch = *epoch, .round = *round, .address = *std::move(address)};
}

}  // namespace cadre::launch
