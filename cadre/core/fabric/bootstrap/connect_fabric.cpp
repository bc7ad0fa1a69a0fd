#include "cadre/core/fabric/bootstrap/connect_fabric.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/fabric/bootstrap/bootstrap_exchange.h"
#include "cadre/core/fabric/bootstrap/dial.h"
#include "cadre/core/fabric/bootstrap/host_segment.h"
#include "cadre/core/fabric/bootstrap/links.h"
#include "cadre/core/fabric/bootstrap/listening.h"
#include "cadre/core/fabric/bootstrap/sponsors.h"
#include "cadre/core/fabric/bootstrap/watch.h"
#include "cadre/core/os/host/descriptor_limit.h"
#include "cadre/core/wire/layout.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;

// The time for which this rank looks in the store for reports of failures after the connection to a
// peer has ended. The peer may have reported why it ended, or the store may be about to publish its
// death.
constexpr Duration kLossPatience = milliseconds(500);
// The next three constants are the times for which this rank looks for reports after a timeout. If
// the deadline passes on all ranks at once, the ranks that know for which rank they waited must
// report first. A rank that waits for other ranks of the tree looks longer, in proportion to the
// number of levels in between.
constexpr Duration kReadyPatience = milliseconds(100);
constexpr Duration kSponsorPatience = milliseconds(1000);
constexpr Duration kPatiencePerLevel = milliseconds(50);

// A counter in the store: how many attempts to connect a group have failed. The count is part of
// the keys of the next attempt, so that it finds no keys of a failed attempt.
class AttemptCounter {
 public:
  // `group_prefix` is the prefix of the store keys of this group and round.
  AttemptCounter(Store& store, const std::string& group_prefix)
      : store_(store), key_(group_prefix + "attempt") {}

  // Returns the number of the attempt that is running now. The first attempt has the number 0.
  // Errors: those of the store; kCorruption for a value that is no number.
  Result<uint64_t> read(Deadline deadline) const;
  // Ends the attempt with the number `failed`. If several ranks end it, the counter is incremented
  // only once. Best effort.
  void leave(uint64_t failed, Deadline deadline) const {
    (void)store_.compare_set(key_, failed == 0 ? "" : std::to_string(failed),
                             std::to_string(failed + 1), deadline);
  }

 private:
  Store& store_;
  const std::string key_;
};

Result<uint64_t> AttemptCounter::read(Deadline deadline) const {
  const auto is_there = store_.check(std::span(&key_, 1), deadline);
  if (!is_there.ok()) return is_there.error();
  if (!*is_there) return uint64_t{0};
  const auto text = store_.get(key_, deadline);
  if (!text.ok()) return text.error();
  uint64_t number = 0;
  const char* const end = text->data() + text->size();
  const auto parsed = std::from_chars(text->data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end) {
    return Error(
        ErrorCode::kCorruption,
        format("store key \"{}\" holds \"{}\", expected a number; check that no other job or "
               "program writes to this store",
               key_, *text));
  }
  return number;
}

std::string group_prefix_of(const Membership& membership, const FabricOptions& options) {
  return format("cadre/{}/{}/", membership.round, options.id);
}

// Returns the group's name for the proofs in handshakes. It contains the number of the attempt, so
// a late connection of an earlier attempt is rejected as if it were of another group.
std::string name_in_proofs(const FabricOptions& options, uint64_t attempt) {
  return attempt == 0 ? options.id : format("{} (attempt {})", options.id, attempt + 1);
}

// Appends the fabric's random number to the group's name, for later handshakes. A process of an
// earlier fabric of the same ranks may dial a port that this process was given since. Its
// connection is rejected, because its group name has another number.
LinkIdentity identity_after(LinkIdentity identity, const Layout& layout) {
  identity.group = format("{}#{:016x}", identity.group, layout.rank_address(0).probe);
  return identity;
}

// Returns the number of cores on which at least one of the ranks may run. Each rank may be bound to
// a core of its own, so the mask of a single rank is not enough.
int num_cores_of(const Layout& layout, std::span<const int> ranks) {
  std::vector<unsigned char> cores;
  for (const int rank : ranks) {
    const std::string& mask = layout.rank_address(rank).core_mask;
    cores.resize(std::max(cores.size(), mask.size()));
    for (size_t i = 0; i < mask.size(); ++i) cores[i] |= static_cast<unsigned char>(mask[i]);
  }
  int num_cores = 0;
  for (const unsigned char byte : cores) num_cores += std::popcount(byte);
  return num_cores;
}

class FabricBuilder {
 public:
  // The first attempt has the number 0.
  FabricBuilder(os::System& system, const Membership& membership, const FabricOptions& options,
                uint64_t attempt, Deadline deadline)
      : system_(system),
        membership_(membership),
        options_(options),
        deadline_(deadline),
        identity_{membership.rank, membership.round, name_in_proofs(options, attempt),
                  options.version, membership.job_token},
        watch_(system, membership,
               BootstrapExchange::prefix_of(group_prefix_of(membership, options), attempt)),
        exchange_({system, membership, watch_, group_prefix_of(membership, options), attempt}) {}

  Result<FabricConnections> build() {
    const Status status = connect_all();
    if (!status.ok()) return explain(status.error());
    return FabricConnections{
        .layout = layout_,
        .settings = std::move(settings_),
        .identity = identity_after(identity_, *layout_),
        .control = links_->take(),
        .tcp_listeners = std::move(listening_.tcp),
        .unix_listener = std::move(listening_.unix),
        .host_memory = std::move(segment_.memory),
        .obstacle = std::move(segment_.obstacle),
        .is_crowded = static_cast<int>(neighbours().size()) > num_cores_of(*layout_, neighbours())};
  }

 private:
  int rank() const { return membership_.rank; }
  const std::vector<int>& neighbours() const { return layout_->ranks_of(layout_->host_of(rank())); }
  Status connect_all();
  Status lay_out();
  Status learn_layout();
  Status receive_layout(int sponsor);
  Status connect_host();
  Status finish_together();
  Error explain(const Error& error);

  os::System& system_;
  const Membership& membership_;
  const FabricOptions& options_;
  const Deadline deadline_;
  const LinkIdentity identity_;
  BootstrapWatch watch_;
  BootstrapExchange exchange_;
  Listening listening_;
  wire::Ticket ticket_;
  std::vector<std::byte> layout_message_;
  std::shared_ptr<const Layout> layout_;
  std::string settings_;
  HostSegment segment_;
  std::optional<Links> links_;
  Duration timeout_patience_{};  // the time for which to look for reports if a timeout occurs now
};

Status FabricBuilder::connect_all() {
  os::raise_descriptor_limit();
  auto listening = start_listening(system_, membership_,
                                   {options_.listen_host, options_.version, options_.device});
  if (!listening.ok()) return listening.error();
  listening_ = std::move(listening).value();
  links_.emplace(
      Links::Context{system_, identity_, watch_, listening_.all(), listening_.rank_address,
                     membership_.store_host, membership_.world_size},
      deadline_);
  CADRE_RETURN_IF_ERROR(exchange_.publish(listening_.rank_address, deadline_));
  CADRE_RETURN_IF_ERROR(rank() == 0 ? lay_out() : learn_layout());
  watch_.know(layout_->rank_addresses);
  const std::vector<int> sponsored = sponsored_by(*layout_, rank());
  links_->greet_with(layout_message_, sponsored);
  CADRE_RETURN_IF_ERROR(
      links_->await(sponsored, [this](int peer) { return layout_->describe(peer); }));
  if (leader_of(*layout_, rank()) != rank()) timeout_patience_ = kSponsorPatience;
  auto segment = share_host_segment(system_, *links_, *layout_, rank(),
                                    {options_.may_share_memory, options_.host_segment_bytes});
  if (!segment.ok()) return segment.error();
  segment_ = std::move(segment).value();
  timeout_patience_ = {};
  CADRE_RETURN_IF_ERROR(connect_host());
  return finish_together();
}

Status FabricBuilder::lay_out() {
  auto rank_addresses = exchange_.collect(deadline_);
  if (!rank_addresses.ok()) return rank_addresses.error();
  if (options_.settings) {
    auto settings = options_.settings();
    if (!settings.ok()) return settings.error();
    settings_ = std::move(settings).value();
  }
  layout_ = std::make_shared<const Layout>(std::move(rank_addresses).value());
  layout_message_ = wire::encode_layout(layout_->rank_addresses, settings_);
  if (layout_message_.size() > wire::kLayoutPrefixBytes + wire::kMaxLayoutBytes) {
    return Error(ErrorCode::kInvalidArgument,
                 format("the layout of {} ranks has {} bytes, more than the limit of {}",
                        layout_->num_ranks(), layout_message_.size(), wire::kMaxLayoutBytes));
  }
  std::vector<wire::Ticket> tickets;
  for (int peer = 1; peer < layout_->num_ranks(); ++peer) {
    const int sponsor = sponsor_of(*layout_, peer);
    tickets.push_back({sponsor, layout_->rank_address(sponsor)});
  }
  return exchange_.hand_out(tickets, deadline_);
}

Status FabricBuilder::learn_layout() {
  auto ticket = exchange_.await_ticket(deadline_);
  if (!ticket.ok()) return ticket.error();
  ticket_ = std::move(ticket).value();
  links_->call(ticket_.sponsor, ticket_.rank_address);
  CADRE_RETURN_IF_ERROR(links_->await(std::array{ticket_.sponsor}, [this](int peer) {
    return describe_rank(ticket_.rank_address, peer);
  }));
  timeout_patience_ = kSponsorPatience;
  CADRE_RETURN_IF_ERROR(receive_layout(ticket_.sponsor));
  timeout_patience_ = {};
  return {};
}

Status FabricBuilder::receive_layout(int sponsor) {
  const std::string what =
      format("waiting for the layout from {}", describe_rank(ticket_.rank_address, sponsor));
  layout_message_.resize(wire::kLayoutPrefixBytes);
  CADRE_RETURN_IF_ERROR(links_->receive({sponsor, what}, layout_message_));
  const auto size = wire::decode_layout_prefix(layout_message_);
  if (!size.ok()) return size.error().with_context(what).with_culprit(sponsor);
  layout_message_.resize(wire::kLayoutPrefixBytes + *size);
  const Bytes body = Bytes(layout_message_).subspan(wire::kLayoutPrefixBytes);
  CADRE_RETURN_IF_ERROR(links_->receive({sponsor, what}, body));
  auto message = wire::decode_layout(body);
  if (!message.ok()) return message.error().with_context(what).with_culprit(sponsor);
  const auto& rank_addresses = message->rank_addresses;
  const bool is_ours = rank_addresses.size() == static_cast<size_t>(membership_.world_size) &&
                       rank_addresses[static_cast<size_t>(rank())] == listening_.rank_address;
  auto layout = std::make_shared<const Layout>(std::move(message->rank_addresses));
  if (!is_ours || sponsor_of(*layout, rank()) != sponsor) {
    return Error(ErrorCode::kCorruption, format("{}: the layout belongs to another job, which has "
                                                "{} ranks; check that no two jobs share a store",
                                                what, layout->num_ranks()))
        .with_culprit(sponsor);
  }
  layout_ = std::move(layout);
  settings_ = std::move(message->settings);
  return {};
}

// Connects the ranks of this host to each other. The higher rank of each pair opens the connection.
// All ranks are connected to the leader already.
Status FabricBuilder::connect_host() {
  std::vector<int> peers;
  for (const int peer : neighbours()) {
    const bool has_leader = peer == neighbours().front() || rank() == neighbours().front();
    if (peer == rank() || has_leader) continue;
    peers.push_back(peer);
    if (peer < rank()) links_->call(peer, layout_->rank_address(peer));
  }
  return links_->await(peers, [this](int peer) { return layout_->describe(peer); });
}

// A rank reports to its sponsor that it and all ranks below it in the tree are connected. When rank
// 0 has all reports, it tells the ranks that they may return. By that time each rank has read its
// ticket, so the keys can be erased.
Status FabricBuilder::finish_together() {
  const std::vector<int> sponsored = sponsored_by(*layout_, rank());
  timeout_patience_ = kReadyPatience + kPatiencePerLevel * height_of(*layout_, rank());
  for (const int peer : sponsored) {
    const std::string what = format("waiting until {} is connected", layout_->describe(peer));
    const auto is_ready = links_->receive_byte({peer, what});
    if (!is_ready.ok()) return is_ready.error();
  }
  timeout_patience_ = kSponsorPatience + kPatiencePerLevel * depth_of(*layout_, rank());
  // This rank has all its control connections. A rank that connects from now on has finished its
  // own bootstrap, so its connection stays in the queue of the listener for the control plane, the
  // next owner.
  links_->stop_accepting();
  if (rank() != 0) {
    const std::string what = format("waiting for {} to report that all ranks are connected",
                                    layout_->describe(ticket_.sponsor));
    CADRE_RETURN_IF_ERROR(links_->send_byte({ticket_.sponsor, what}, true));
    CADRE_RETURN_IF_ERROR(exchange_.erase(deadline_));
    const auto is_over = links_->receive_byte({ticket_.sponsor, what});
    if (!is_over.ok()) return is_over.error();
  }
  for (const int peer : sponsored) {
    const std::string what =
        format("telling {} that all ranks are connected", layout_->describe(peer));
    CADRE_RETURN_IF_ERROR(links_->send_byte({peer, what}, true));
  }
  return rank() == 0 ? exchange_.erase(deadline_) : Status();
}

// Returns the error that another rank has reported, if there is one, because it is more specific:
// if a rank gave up, this rank has only seen that its connection ended. Otherwise reports this
// rank's error to all ranks.
Error FabricBuilder::explain(const Error& error) {
  const bool is_loss = error.code() == ErrorCode::kPeerLost;
  const Duration patience = is_loss                               ? kLossPatience
                            : error.code() == ErrorCode::kTimeout ? timeout_patience_
                                                                  : Duration{};
  if (patience > Duration{} && !watch_.was_told()) {
    const Status trouble = watch_.await_report(patience);
    if (!trouble.ok()) return trouble.error().with_reporter(rank());
  }
  const Error own = error.with_reporter(rank());
  watch_.report(own);
  return own;
}

}  // namespace

Result<FabricConnections> connect_fabric(os::System& system, const Membership& membership,
                                         const FabricOptions& options, Deadline deadline) {
  const AttemptCounter attempts(*membership.store, group_prefix_of(membership, options));
  const Result<uint64_t> attempt = attempts.read(deadline);
  if (!attempt.ok()) return attempt.error();
  auto connections = FabricBuilder(system, membership, options, *attempt, deadline).build();
  if (!connections.ok()) attempts.leave(*attempt, system.deadline_in(BootstrapWatch::kStoreTime));
  return connections;
}

}  // namespace cadre
