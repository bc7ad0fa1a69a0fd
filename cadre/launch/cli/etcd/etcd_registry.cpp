#include "cadre/launch/cli/etcd/etcd_registry.h"

#include "cadre/core/base/format.h"

namespace cadre::cli {
namespace {

using launch::Claim;

// So often the key may change between reading and writing it in one call.
constexpr int kMaxTries = 5;

}  // namespace

EtcdRegistry::EtcdRegistry(EtcdClient client, std::string job)
    : client_(std::move(client)), job_(std::move(job)), key_(claim_key(job_)) {}

Result<std::optional<Claim>> EtcdRegistry::find(Deadline deadline) {
  const auto entry = client_.get(key_, deadline);
  if (!entry.ok()) return entry.error();
  return decode(*entry);
}

Result<std::optional<Claim>> EtcdRegistry::claim(const Claim& own, Deadline deadline) {
  const std::string text = launch::encode_claim(job_, own);
  for (int i = 0; i < kMaxTries; ++i) {
    const auto entry = client_.get(key_, deadline);
    if (!entry.ok()) return entry.error();
    auto present = decode(*entry);
    if (!present.ok()) return present.error();
    if (*present && !launch::replaces(own, **present)) return present;
    CADRE_RETURN_IF_ERROR(hold_lease(deadline));
    const bool is_written = *present == own && (**entry).lease == lease_;
    if (is_written) return present;
    const auto written =
        client_.put_if(key_, *entry ? (**entry).revision : 0, text, lease_, deadline);
    if (!written.ok()) return written.error();
    if (*written) return std::optional(own);
  }
  return std::optional<Claim>();
}

Result<std::optional<Claim>> EtcdRegistry::decode(
    const std::optional<EtcdClient::Entry>& entry) const {
  if (!entry) return std::optional<Claim>();
  auto claim = launch::decode_claim(job_, entry->value, cadre::format("the key {}", key_));
  if (!claim.ok()) return claim.error();
  return std::optional(*std::move(claim));
}

Status EtcdRegistry::hold_lease(Deadline deadline) {
  if (lease_ != 0) {
    const auto is_kept = client_.keep_lease(lease_, deadline);
    if (!is_kept.ok()) return is_kept.error();
    if (*is_kept) return {};
  }
  const auto lease = client_.grant_lease(kLease.count(), deadline);
  if (!lease.ok()) return lease.error();
  lease_ = *lease;
  return {};
}

Status EtcdRegistry::release(launch::AgentId /*agent*/, Deadline deadline) {
  if (lease_ == 0) return {};
  // A claim that has replaced this agent's has another lease, so it stays.
  const auto is_alive = client_.keep_lease(lease_, deadline);
  if (!is_alive.ok()) return is_alive.error();
  if (*is_alive) CADRE_RETURN_IF_ERROR(client_.revoke_lease(lease_, deadline));
  lease_ = 0;
  return {};
}

std::string claim_key(std::string_view job) {
  return cadre::format("/cadre/coordinator/{}", job);
}

}  // namespace cadre::cli
