#include "cadre/launch/hosts/file_registry.h"

#include <cctype>
#include <filesystem>
#include <system_error>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::launch {
namespace {

constexpr int kMaxTries = 5;

}  // namespace

FileRegistry::FileRegistry(Options options)
    : options_(std::move(options)), place_(cadre::format("the file {}", options_.path)) {}

Result<std::optional<Claim>> FileRegistry::find(Deadline /*deadline*/) {
  // Other agents make and remove the file at any time, also between these two calls.
  auto text = os::read_file(options_.path, Claim::kMaxTextBytes);
  for (int i = 0; !text.ok() && i < kMaxTries; ++i) {
    std::error_code failure;
    const auto kind = std::filesystem::symlink_status(options_.path, failure).type();
    if (kind == std::filesystem::file_type::not_found) return std::optional<Claim>();
    text = os::read_file(options_.path, Claim::kMaxTextBytes);
  }
  if (!text.ok()) return text.error();
  auto claim = decode_claim(options_.job, *text, place_);
  if (!claim.ok()) return claim.error();
  return std::optional(*std::move(claim));
}

Result<std::optional<Claim>> FileRegistry::claim(const Claim& own, Deadline deadline) {
  const auto has_lock = take_lock();
  if (!has_lock.ok()) return has_lock.error();
  const auto found = find(deadline);
  if (!found.ok()) return found.error();
  const std::optional<Claim>& present = *found;
  if (present == own) {
    is_fresh_ = false;
    return present;
  }
  // The agent of a claim that is older than this lock has ended. Otherwise it may be alive: it
  // holds the lock, or it has replaced the claim of this agent, which does.
  const bool is_stale = *has_lock && is_fresh_;
  const bool may_write =
      is_stale || (present ? replaces(own, *present) : *has_lock || own.round > 0);
  if (!may_write) return present;
  const std::string text = encode_claim(options_.job, own);
  CADRE_RETURN_IF_ERROR(os::replace_file(options_.path, wire::as_bytes(text)));
  is_fresh_ = false;
  return std::optional(own);
}

Result<bool> FileRegistry::take_lock() {
  const std::string path = options_.path + ".lock";
  if (lock_ && lock_->is_named()) return true;
  lock_.reset();
  auto file = os::LockedFile::open(path);
  if (!file.ok()) return file.error();
  const auto is_taken = file->try_lock();
  if (!is_taken.ok()) return is_taken.error();
  // The last holder may have removed the file after it was opened here.
  if (*is_taken && file->is_named()) {
    lock_ = *std::move(file);
    is_fresh_ = true;
  }
  return lock_.has_value();
}

Status FileRegistry::release(AgentId agent, Deadline deadline) {
  const auto present = find(deadline);
  if (present.ok() && *present && (*present)->agent == agent) {
    std::error_code failure;
    std::filesystem::remove(options_.path, failure);
  }
  const Status removed = lock_ && lock_->is_named() ? lock_->remove() : Status();
  lock_.reset();
  return removed;
}

std::string claim_path(const std::string& endpoint, std::string_view job) {
  std::error_code failure;
  if (!std::filesystem::is_directory(endpoint, failure)) return endpoint;
  std::string name = "cadre-";
  for (const char c : job) {
    const auto byte = static_cast<unsigned char>(c);
    const bool is_plain = std::isalnum(byte) != 0 || c == '-' || c == '_' || c == '.';
    name += is_plain ? std::string(1, c) : cadre::format("%{:02x}", static_cast<unsigned>(byte));
  }
  return std::filesystem::path(endpoint) / (name + ".coordinator");
}

}  // namespace cadre::launch
