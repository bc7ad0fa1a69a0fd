#include "cadre/comm/bootstrap/mesh.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/comm/bootstrap/attempt_counter.h"
#include "cadre/comm/bootstrap/callers.h"
#include "cadre/comm/bootstrap/handshake.h"
#include "cadre/comm/bootstrap/watch.h"
#include "cadre/comm/defaults.h"
#include "cadre/os/host/descriptor_limit.h"
#include "cadre/rendezvous/meeting.h"

namespace cadre {
namespace {

using wire::LinkPurpose;

// A proof that is under way when this rank gives up connecting.
constexpr Duration kFinishAnswersTime = std::chrono::milliseconds(500);
// How long a rank waits for one that failed in the attempt before to try again.
constexpr Duration kRetryPatience = std::chrono::seconds(5);
// Before a call that the other end dropped is made again.
constexpr Duration kRedialPause = std::chrono::milliseconds(100);

std::string group_prefix_of(const Membership& membership, const MeshOptions& options) {
  return format("cadre/{}/{}/", membership.round, options.id);
}

std::string attempt_prefix_of(const Membership& membership, const MeshOptions& options,
                              uint64_t attempt) {
  return format("{}{}/", group_prefix_of(membership, options), attempt);
}

// A connection of an earlier attempt, which may come late, is of another group.
std::string name_in_proofs(const MeshOptions& options, uint64_t attempt) {
  return attempt == 0 ? options.id : format("{} (attempt {})", options.id, attempt + 1);
}

std::string describe(const wire::RankCard& card, int rank) {
  return format("rank {} ({}, pid {})", rank, card.host, card.pid);
}

class MeshBuilder {
 public:
  // Attempt 0 is the first.
  MeshBuilder(os::System& system, const Membership& membership, const MeshOptions& options,
              uint64_t attempt, Deadline deadline)
      : system_(system),
        membership_(membership),
        options_(options),
        attempt_(attempt),
        deadline_(deadline),
        terms_{membership.rank, membership.round, name_in_proofs(options, attempt), options.version,
               membership.job_token},
        prefix_(attempt_prefix_of(membership, options, attempt)),
        watch_(system, membership, prefix_) {}

  Result<Mesh> build() {
    Result<Mesh> mesh = connect_all();
    if (mesh.ok()) return mesh;
    const Error error = mesh.error().with_reporter(membership_.rank);
    watch_.report(error);
    return error;
  }

 private:
  std::string card_key(int rank) const { return format("{}card/{}", prefix_, rank); }
  Result<Mesh> connect_all();
  Status listen();
  Status listen_unix();
  Result<os::Address> address_of(int peer) const;
  Error unreachable(int peer, const os::Address& address, const Error& error) const;
  Status publish_card();
  Status read_cards();
  Status check_retry(std::span<const std::string> keys) const;
  Error missing_cards(std::span<const std::string> keys, const Error& error);
  Status check_versions() const;
  int num_cores_of(const HostGroup& host) const;
  Status connect_links(Mesh& mesh);
  // A connection that this rank opens; without a handshake while it is to be opened.
  struct Call {
    int peer = 0;
    LinkPurpose purpose{};
    TimePoint not_before{};
    std::optional<Handshake> handshake{};
  };
  Status run_handshakes(Mesh& mesh, std::vector<Call>& calls, Callers& callers);
  Status step_calls(Mesh& mesh, std::vector<Call>& calls);
  Result<bool> dial_next(std::vector<Call>& calls);
  void finish_answers(Mesh& mesh, Callers& callers);
  Status place(Mesh& mesh, Handshake& handshake);
  std::vector<int> unconnected_ranks(const Mesh& mesh) const;
  Error missing_links(const Mesh& mesh, const Callers& callers) const;
  void tell_connected(const Mesh& mesh, const Error& error) const;
  Status erase_keys();

  os::System& system_;
  const Membership& membership_;
  const MeshOptions& options_;
  const uint64_t attempt_;
  const Deadline deadline_;
  const LinkTerms terms_;
  const std::string prefix_;
  BootstrapWatch watch_;
  std::vector<std::unique_ptr<os::Listener>> tcp_;  // one for each address of this host
  std::unique_ptr<os::Listener> unix_;
  wire::RankCard card_;
  std::vector<wire::RankCard> cards_;
};

Result<Mesh> MeshBuilder::connect_all() {
  // Up to three connections for each of the other ranks.
  os::raise_descriptor_limit();
  CADRE_RETURN_IF_ERROR(listen());
  CADRE_RETURN_IF_ERROR(publish_card());
  CADRE_RETURN_IF_ERROR(read_cards());
  CADRE_RETURN_IF_ERROR(check_versions());
  auto host = HostGroup::form(
      {system_, terms_, cards_, *unix_, *membership_.store, watch_, prefix_}, deadline_);
  if (!host.ok()) return host.error();
  Mesh mesh{.cards = cards_, .host = std::move(host).value()};
  const bool is_one_host = static_cast<int>(mesh.host.members().size()) == membership_.world_size;
  const bool can_share = is_one_host && mesh.host.shares_memory();
  if (options_.transport == TransportChoice::kSharedMemory && !can_share) {
    return Error(ErrorCode::kInvalidArgument,
                 format("shared memory was demanded, but {}: choose kAuto or kTcp",
                        is_one_host ? mesh.host.obstacle() : "the ranks are on several hosts"));
  }
  mesh.uses_shared_memory = can_share && options_.transport != TransportChoice::kTcp;
  mesh.is_crowded = static_cast<int>(mesh.host.members().size()) > num_cores_of(mesh.host);
  Status status = connect_links(mesh);
  if (status.ok()) status = erase_keys();
  if (!status.ok()) {
    tell_connected(mesh, status.error());
    return status.error();
  }
  return mesh;
}

// To the ranks that may have gone on into their operations this rank would only seem gone. That
// this rank could not reach another one does not mean that they have lost it.
void MeshBuilder::tell_connected(const Mesh& mesh, const Error& error) const {
  const std::string message =
      format("{} gave up connecting: {}", describe(card_, membership_.rank.value), error.message());
  const bool is_loss = error.code() == ErrorCode::kPeerLost;
  const ErrorDetails& details = error.details();
  const auto notice = wire::encode_control(wire::AbortNotice{
      is_loss ? ErrorCode::kAborted : error.code(), details.culprit.value_or(-1).value,
      details.reporter.value_or(membership_.rank).value, message, message});
  for (const auto& socket : mesh.control) {
    ConstBytes rest = notice;
    while (socket != nullptr && !rest.empty()) {
      const auto sent = socket->try_send(rest);
      if (!sent.ok() || *sent == 0) break;
      rest = rest.subspan(*sent);
    }
  }
}

Status MeshBuilder::listen() {
  std::vector<std::string> hosts = membership_.listen_hosts;
  if (!options_.listen_host.empty()) hosts = {options_.listen_host};
  if (hosts.empty()) hosts = {"127.0.0.1"};
  for (const std::string& host : hosts) {
    if (membership_.job_token.empty() && !is_loopback_host(host)) {
      return Error(ErrorCode::kInvalidArgument,
                   format("rank {} is to listen on {}, which other hosts reach, and that needs a "
                          "job token; set CADRE_JOB_TOKEN to one secret on all ranks",
                          membership_.rank, host));
    }
    auto tcp = system_.listen({os::Address::Kind::kTcp, host, 0});
    if (!tcp.ok()) return tcp.error();
    card_.tcp_address += format("{}{}", tcp_.empty() ? "" : " ", (*tcp)->address().to_string());
    tcp_.push_back(std::move(tcp).value());
  }
  return listen_unix();
}

Status MeshBuilder::listen_unix() {
  std::array<uint64_t, 3> random{};
  system_.random_bytes(std::as_writable_bytes(std::span(random)));
  card_.probe = random[2] | 1;  // never the zero of fresh memory
  auto unix_listener = system_.listen(
      {os::Address::Kind::kUnix, format("cadre-{:016x}{:016x}", random[0], random[1]), 0});
  if (!unix_listener.ok()) return unix_listener.error();
  unix_ = std::move(unix_listener).value();
  return {};
}

Status MeshBuilder::publish_card() {
  const os::HostInfo host = system_.host();
  card_.version = options_.version;
  card_.host = host.name;
  card_.boot_id = host.boot_id;
  card_.pid = host.pid;
  card_.core_mask = host.core_mask;
  card_.unix_address = unix_->address().to_string();
  return membership_.store->set(card_key(membership_.rank), wire::encode_card(card_), deadline_);
}

Status MeshBuilder::read_cards() {
  std::vector<std::string> keys;
  for (int rank = 0; rank < membership_.world_size; ++rank) keys.push_back(card_key(rank));
  auto values = watch_.multi_get(
      keys, attempt_ == 0 ? deadline_ : deadline_.earlier(system_.deadline_in(kRetryPatience)));
  const bool is_early = !deadline_.has_passed(system_.now());
  if (!values.ok() && values.error().code() == ErrorCode::kTimeout && is_early) {
    CADRE_RETURN_IF_ERROR(check_retry(keys));
    values = watch_.multi_get(keys, deadline_);
  }
  if (!values.ok()) return missing_cards(keys, values.error());
  for (size_t i = 0; i < values->size(); ++i) {
    auto card = wire::decode_card((*values)[i]);
    if (!card.ok()) return card.error().with_context(format("card of rank {}", i));
    cards_.push_back(std::move(card).value());
  }
  watch_.know(cards_);
  return {};
}

// The trouble of the attempt before, if the rank that met it has not come again.
Status MeshBuilder::check_retry(std::span<const std::string> keys) const {
  const Deadline deadline = system_.deadline_in(BootstrapWatch::kStoreTime);
  BootstrapWatch earlier(system_, membership_,
                         attempt_prefix_of(membership_, options_, attempt_ - 1));
  const Status trouble = earlier.look_for_report(deadline);
  if (trouble.ok()) return {};
  const auto reporter = static_cast<size_t>(trouble.error().details().reporter.value_or(-1).value);
  if (reporter >= keys.size()) return {};
  const auto has_come = membership_.store->check(keys.subspan(reporter, 1), deadline);
  return has_come.ok() && *has_come ? Status() : trouble;
}

// Names the ranks that did not come; asking again costs a moment beyond the deadline.
Error MeshBuilder::missing_cards(std::span<const std::string> keys, const Error& error) {
  if (error.code() != ErrorCode::kTimeout) return error;
  const Deadline deadline = system_.deadline_in(BootstrapWatch::kStoreTime);
  std::string names;
  std::optional<Rank> first;
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto is_there = membership_.store->check(keys.subspan(i, 1), deadline);
    if (!is_there.ok()) return error;
    if (*is_there) continue;
    names += format("{}{}", names.empty() ? "" : ", ", i);
    if (!first) first = static_cast<int>(i);
  }
  return Error(ErrorCode::kTimeout,
               format("these ranks did not come before the deadline: {} (of {}). Look at their "
                      "logs, or give more time",
                      names, membership_.world_size))
      .with_details({.culprit = first});
}

Status MeshBuilder::check_versions() const {
  for (size_t i = 0; i < cards_.size(); ++i) {
    if (cards_[i].version != card_.version) {
      return Error(ErrorCode::kInvalidArgument,
                   format("{} runs Cadre {}, {} runs Cadre {}: use one build on all ranks",
                          describe(cards_[i], static_cast<int>(i)), cards_[i].version,
                          describe(card_, membership_.rank), card_.version));
    }
  }
  return {};
}

// Of all members together: each alone may be bound to a core of its own.
int MeshBuilder::num_cores_of(const HostGroup& host) const {
  std::vector<unsigned char> cores;
  for (const int member : host.members()) {
    const std::string& mask = cards_[static_cast<size_t>(member)].core_mask;
    cores.resize(std::max(cores.size(), mask.size()));
    for (size_t i = 0; i < mask.size(); ++i) cores[i] |= static_cast<unsigned char>(mask[i]);
  }
  int num_cores = 0;
  for (const unsigned char byte : cores) num_cores += std::popcount(byte);
  return num_cores;
}

Status MeshBuilder::connect_links(Mesh& mesh) {
  const auto world = static_cast<size_t>(membership_.world_size);
  std::vector<LinkPurpose> purposes = {LinkPurpose::kControl};
  mesh.control.resize(world);
  if (!mesh.uses_shared_memory) {
    purposes.insert(purposes.end(), {LinkPurpose::kCollective, LinkPurpose::kPointToPoint});
    mesh.collective.resize(world);
    mesh.point_to_point.resize(world);
  }
  std::vector<Call> calls;
  for (int peer = 0; peer < membership_.rank; ++peer) {
    for (const LinkPurpose purpose : purposes) calls.push_back({peer, purpose});
  }
  std::vector<os::Listener*> listeners;
  for (const auto& listener : tcp_) listeners.push_back(listener.get());
  Callers callers(system_, terms_, std::move(listeners),
                  (world - 1) * purposes.size() - calls.size());
  const Status status = run_handshakes(mesh, calls, callers);
  if (!status.ok()) finish_answers(mesh, callers);
  return status;
}

// A rank of the store's host may be reached at several addresses: this rank takes the one at which
// it reaches the store.
Result<os::Address> MeshBuilder::address_of(int peer) const {
  std::string_view rest = cards_[static_cast<size_t>(peer)].tcp_address;
  std::optional<os::Address> first;
  while (!rest.empty()) {
    const size_t blank = std::min(rest.find(' '), rest.size());
    Result<os::Address> address = os::Address::parse(rest.substr(0, blank));
    if (!address.ok()) return address.error().with_context(format("card of rank {}", peer));
    if (address->host == membership_.store_host) return address;
    if (!first) first = *address;
    rest.remove_prefix(std::min(blank + 1, rest.size()));
  }
  if (first) return *first;
  return Error(ErrorCode::kCorruption, format("the card of rank {} has no address", peer));
}

Error MeshBuilder::unreachable(int peer, const os::Address& address, const Error& error) const {
  const wire::RankCard& card = cards_[static_cast<size_t>(peer)];
  const bool is_gone = error.code() == ErrorCode::kUnavailable;
  const bool is_hidden = is_loopback_host(address.host) && card.host != card_.host;
  return Error(is_gone ? ErrorCode::kPeerLost : error.code(),
               format("{} cannot reach {}: {}. {}", describe(card_, membership_.rank),
                      describe(card, peer), error.message(),
                      is_hidden ? "It listens on loopback alone: name its address by listen_host"
                                : "Check that the process runs and that no firewall or route is "
                                  "in between"))
      .with_culprit(peer);
}

// Called and accepted connections together, so that no order of ranks can block.
Status MeshBuilder::run_handshakes(Mesh& mesh, std::vector<Call>& calls, Callers& callers) {
  while (true) {
    CADRE_RETURN_IF_ERROR(step_calls(mesh, calls));
    for (Handshake& handshake : callers.advance()) {
      // One that is for nothing here is the caller's error, not this rank's.
      static_cast<void>(place(mesh, handshake));
    }
    if (unconnected_ranks(mesh).empty()) return {};
    const Result<bool> has_dialed = dial_next(calls);
    if (!has_dialed.ok()) return has_dialed.error();
    if (*has_dialed) continue;
    if (deadline_.has_passed(system_.now())) return missing_links(mesh, callers);
    std::vector<os::PollItem> items;
    callers.add_interests(items);
    Deadline next = callers.next_deadline(deadline_);
    for (const Call& call : calls) {
      if (call.handshake) items.push_back(call.handshake->interest());
      if (!call.handshake) next = next.earlier(Deadline(call.not_before));
    }
    CADRE_RETURN_IF_ERROR(watch_.poll(items, next));
  }
}

// A busy rank may drop a connection whose proof takes too long (callers.h): such a call is made
// again.
Status MeshBuilder::step_calls(Mesh& mesh, std::vector<Call>& calls) {
  for (size_t i = 0; i < calls.size();) {
    Call& call = calls[i];
    Status status = call.handshake ? call.handshake->step() : Status();
    if (!status.ok() && status.error().code() == ErrorCode::kPeerLost) {
      call.handshake.reset();
      call.not_before = system_.now() + kRedialPause;
      status = {};
    }
    const bool is_done = status.ok() && call.handshake && call.handshake->is_done();
    if (is_done) status = place(mesh, *call.handshake);
    if (!status.ok()) {
      return status.error()
          .with_context(format("connecting to {}",
                               describe(cards_[static_cast<size_t>(call.peer)], call.peer)))
          .with_culprit(call.peer);
    }
    if (is_done) {
      calls.erase(calls.begin() + static_cast<ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  return {};
}

// One at a time, so that the others are heard in between. All ranks listened before they published,
// so a refused connection means that the rank is gone. False when none is to be made just now.
Result<bool> MeshBuilder::dial_next(std::vector<Call>& calls) {
  const TimePoint now = system_.now();
  const auto call = std::ranges::find_if(
      calls, [now](const Call& one) { return !one.handshake && one.not_before <= now; });
  if (call == calls.end()) return false;
  const auto address = address_of(call->peer);
  if (!address.ok()) return address.error();
  const Deadline patience = deadline_.earlier(system_.deadline_in(kConnectPeerTimeout));
  auto socket = system_.connect(*address, patience);
  if (!socket.ok()) return unreachable(call->peer, *address, socket.error());
  call->handshake =
      Handshake::call(system_, std::move(socket).value(), terms_, call->peer, call->purpose);
  return true;
}

// Callers that were challenged are about to go on into their operations, so they must be told, too,
// that this rank gives up: as soon as they have proved that they are no strangers.
void MeshBuilder::finish_answers(Mesh& mesh, Callers& callers) {
  const Deadline patience = deadline_.earlier(system_.deadline_in(kFinishAnswersTime));
  callers.stop_accepting();
  while (true) {
    for (Handshake& handshake : callers.advance()) static_cast<void>(place(mesh, handshake));
    if (callers.is_empty() || patience.has_passed(system_.now())) return;
    std::vector<os::PollItem> items;
    callers.add_interests(items);
    system_.poll(items, callers.next_deadline(patience));
  }
}

// A rank that calls again for a purpose has lost its first connection for it.
Status MeshBuilder::place(Mesh& mesh, Handshake& handshake) {
  const wire::Hello& hello = handshake.hello();
  const int peer = hello.from == membership_.rank.value ? hello.to : hello.from;
  auto* sockets = hello.purpose == LinkPurpose::kControl        ? &mesh.control
                  : hello.purpose == LinkPurpose::kCollective   ? &mesh.collective
                  : hello.purpose == LinkPurpose::kPointToPoint ? &mesh.point_to_point
                                                                : nullptr;
  if (sockets == nullptr || peer < 0 || static_cast<size_t>(peer) >= sockets->size() ||
      peer == membership_.rank.value) {
    return Error(ErrorCode::kInvalidArgument,
                 format("an unexpected connection from rank {}", peer));
  }
  (*sockets)[static_cast<size_t>(peer)] = handshake.take();
  return {};
}

std::vector<int> MeshBuilder::unconnected_ranks(const Mesh& mesh) const {
  const auto is_missing = [&](const std::vector<std::unique_ptr<os::Socket>>& sockets, int rank) {
    return !sockets.empty() && sockets[static_cast<size_t>(rank)] == nullptr;
  };
  std::vector<int> ranks;
  for (int rank = 0; rank < membership_.world_size; ++rank) {
    if (rank == membership_.rank) continue;
    if (is_missing(mesh.control, rank) || is_missing(mesh.collective, rank) ||
        is_missing(mesh.point_to_point, rank)) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

Error MeshBuilder::missing_links(const Mesh& mesh, const Callers& callers) const {
  const std::vector<int> ranks = unconnected_ranks(mesh);
  std::string names;
  for (const int rank : ranks) {
    names += format("{}{}", names.empty() ? "" : ", ",
                    describe(cards_[static_cast<size_t>(rank)], rank));
  }
  return Error(ErrorCode::kTimeout,
               format("connected to the store, but not to this rank before the deadline: {}. Look "
                      "at their logs, or give more time{}",
                      names, callers.accept_failure()))
      .with_culprit(ranks.front());
}

Status MeshBuilder::erase_keys() {
  for (const char* kind : {"card", "side"}) {
    const auto erased =
        membership_.store->erase(format("{}{}/{}", prefix_, kind, membership_.rank), deadline_);
    if (!erased.ok()) return erased.error();
  }
  return {};
}

}  // namespace

Result<Mesh> connect_mesh(os::System& system, const Membership& membership,
                          const MeshOptions& options, Deadline deadline) {
  const AttemptCounter attempts(*membership.store, group_prefix_of(membership, options));
  const Result<uint64_t> attempt = attempts.read(deadline);
  if (!attempt.ok()) return attempt.error();
  Result<Mesh> mesh = MeshBuilder(system, membership, options, *attempt, deadline).build();
  if (!mesh.ok()) attempts.leave(*attempt, system.deadline_in(BootstrapWatch::kStoreTime));
  return mesh;
}

}  // namespace cadre
