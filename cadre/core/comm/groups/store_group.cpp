// Groups that only their members create, over a store.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/checks.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/comm/groups/make_group.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/comm/queue/thrown_error.h"
#include "cadre/core/rendezvous/missing_ranks.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre {
namespace {

constexpr Duration kLookForLosses = std::chrono::milliseconds(500);
constexpr std::string_view kOverStore = "new_group_over_store";

[[noreturn]] void refuse_id(const Communicator& any, const std::string& id, std::string_view why) {
  throw refusal_of(any, kOverStore,
                   format("the id \"{}\" was used before, {}: use a new id for each group, and for "
                          "each new attempt to make one",
                          id, why));
}

// Returns whether this process has a group that was created under this identity, or had such a
// group and some member has not left it yet.
bool is_in_group(const Communicator::Impl& impl, const GroupIdentity& creation) {
  const ControlPlane* const plane = impl.fabric->plane();
  return plane != nullptr && plane->is_attached(creation.key());
}

// Exchanges the arguments of the members through a store, because there is no parent group in which
// all ranks make the call.
class StoreExchange {
 public:
  // `ranks` are the members; the calling rank of `any` is one of them.
  StoreExchange(const Communicator& any, const StoreGroupOptions& options,
                std::span<const Rank> ranks)
      : any_(any),
        group_(CommunicatorParts::impl_of(any)),
        store_(*options.store),
        id_(options.id),
        ranks_(ranks) {
    // The prefix of the keys does not depend on the ranks, so that members with different lists
    // find each other's keys.
    const GroupIdentity id =
        GroupIdentity::of_creation(id_, group_.fabric->connection_number(), {});
    const std::string prefix =
        format("cadre/{}/{}", group_.members.membership.round, id.unique_name());
    const std::vector<int> members = fabric_ranks(group_, ranks);
    for (const int member : members) keys_.push_back(format("{}/member/{}", prefix, member));
    count_key_ = format("{}/num_read/{:016x}", prefix, digest_of_ranks(members));
  }

  // Publishes `own`. Returns false if this rank's key exists already, for example from a failed
  // attempt. Then `own` is not written, so no member can read it.
  bool put(const NewGroupCall& own, Deadline deadline) const {
    const auto self = std::ranges::find(ranks_, any_.rank()) - ranks_.begin();
    const std::string text(wire::as_text(std::as_bytes(std::span(&own, 1))));
    return store_.compare_set(keys_[static_cast<size_t>(self)], "", text, deadline)
               .value_or_throw() == text;
  }

  // Returns the arguments of all members, in the order of the list. REQUIRES: put() has succeeded.
  std::vector<NewGroupCall> gather(const NewGroupCall& own, Deadline deadline) const {
    await_all(own, deadline);
    std::vector<NewGroupCall> calls;
    const auto texts = store_.multi_get(keys_, deadline).value_or_throw();
    for (size_t i = 0; i < texts.size(); ++i) calls.push_back(read(i, texts[i], own));
    erase_after_last_reader(deadline);
    return calls;
  }

 private:
  NewGroupCall read(size_t i, std::string_view text, const NewGroupCall& own) const {
    NewGroupCall call;
    if (text.size() != sizeof(call)) {
      throw Error(
          ErrorCode::kCorruption,
          format("new_group_over_store: rank {} wrote {} bytes as \"{}\" instead of {}: use "
                 "one build on all ranks",
                 ranks_[i], text.size(), keys_[i], sizeof(call)));
    }
    std::memcpy(&call, text.data(), sizeof(call));
    if (call.digest == own.digest) return call;
    throw refusal_of(any_, kOverStore,
                     format("this rank passes the ranks {} for \"{}\", but rank {} passes others: "
                            "every member must pass the same ranks in the same order",
                            list_of(ranks_), id_, ranks_[i]));
  }

  // Waits until all members have written their keys. Periodically checks the keys that exist, and
  // whether a missing member is lost or has left.
  void await_all(const NewGroupCall& own, Deadline deadline) const {
    std::optional<Rank> gone;
    while (true) {
      const Deadline look = deadline.earlier(group_.system.deadline_in(kLookForLosses));
      const Status status = store_.wait(keys_, look);
      if (status.ok()) return;
      if (status.error().code() != ErrorCode::kTimeout) throw status.error();
      check_failure(group_);
      const std::vector<Rank> missing = read_present(own);
      // A member may have written its key before it ended. The keys were read again after its end
      // was known, so a key that is still missing will never be written.
      if (gone && std::ranges::find(missing, *gone) != missing.end()) {
        throw ended_member(*gone);
      }
      gone = first_gone(missing);
      if (deadline.has_passed(group_.system.now())) throw missing_member(missing);
    }
  }

  // Returns the members without a key. Throws if the arguments in a key contradict those of this
  // rank.
  std::vector<Rank> read_present(const NewGroupCall& own) const {
    const Deadline soon = group_.system.deadline_in(kLookForLosses);
    const auto absent = find_missing_ranks(store_, keys_, soon);
    if (!absent.ok()) return {};
    std::vector<Rank> missing;
    for (size_t i = 0; i < keys_.size(); ++i) {
      if (std::ranges::binary_search(*absent, static_cast<int>(i))) {
        missing.push_back(ranks_[i]);
      } else if (const auto text = store_.get(keys_[i], soon); text.ok()) {
        static_cast<void>(read(i, *text, own));
      }
    }
    return missing;
  }

  std::optional<Rank> first_gone(std::span<const Rank> missing) const {
    const ControlPlane* const plane = group_.fabric->plane();
    for (const Rank rank : missing) {
      const int of_world = group_.members.ranks[static_cast<size_t>(rank.value)];
      if (plane != nullptr && (plane->loss_of(of_world) || plane->has_left(of_world))) return rank;
    }
    return std::nullopt;
  }

  Error ended_member(Rank rank) const {
    const int of_world = group_.members.ranks[static_cast<size_t>(rank.value)];
    const bool is_lost = group_.fabric->plane()->loss_of(of_world).has_value();
    return error_of_rank(
        group_, ErrorCode::kPeerLost, rank.value,
        format("new_group_over_store of \"{}\": {} {} before it called new_group_over_store: every "
               "member must make this call before it closes its groups",
               id_, describe(rank), is_lost ? "was lost" : "left the job"));
  }

  Error missing_member(std::span<const Rank> missing) const {
    if (missing.empty()) {
      return Error(ErrorCode::kTimeout,
                   format("new_group_over_store of \"{}\": the store answers too slowly", id_));
    }
    std::string names;
    for (const Rank rank : missing) names += (names.empty() ? "" : ", ") + describe(rank);
    return error_of_rank(
        group_, ErrorCode::kTimeout, missing.front().value,
        format("new_group_over_store of \"{}\": {} did not call it before the deadline: all "
               "members must make this call with this id and this list; give more time if they are "
               "late, and use a new id to try again",
               id_, names));
  }

  // Erases the keys when the last member has read them. Best effort: the group exists by now, and
  // keys that remain have no effect.
  void erase_after_last_reader(Deadline deadline) const {
    const auto num_read = store_.add(count_key_, 1, deadline);
    if (!num_read.ok() || *num_read < static_cast<int64_t>(keys_.size())) return;
    for (const std::string& key : keys_) static_cast<void>(store_.erase(key, deadline));
    static_cast<void>(store_.erase(count_key_, deadline));
  }

  std::string describe(Rank rank) const { return group_.monitor->roster().describe(rank.value); }

  const Communicator& any_;
  const Communicator::Impl& group_;
  Store& store_;
  const std::string& id_;
  const std::span<const Rank> ranks_;
  std::vector<std::string> keys_;  // keys_[m] is the key of member m
  std::string count_key_;
};

std::vector<uint64_t> stamps_of(std::span<const NewGroupCall> calls) {
  std::vector<uint64_t> stamps;
  for (const NewGroupCall& call : calls) stamps.push_back(call.stamp);
  return stamps;
}

}  // namespace

std::unique_ptr<Communicator> new_group_over_store(const Communicator& any,
                                                   std::span<const Rank> ranks,
                                                   const StoreGroupOptions& options,
                                                   Deadline deadline) {
  check_list(kOverStore, any, ranks);
  const bool has_others = ranks.size() > 1 && !CommunicatorParts::impl_of(any).is_lone();
  if (options.store == nullptr && has_others) {
    throw refusal_of(any, kOverStore, "StoreGroupOptions::store is null; pass a store");
  }
  if (options.id.empty()) {
    throw refusal_of(any, kOverStore, "StoreGroupOptions::id is empty; pass the id of the group");
  }
  const Communicator::Impl& impl = CommunicatorParts::impl_of(any);
  check_usable(impl, kOverStore);
  if (std::ranges::find(ranks, any.rank()) == ranks.end()) {
    throw refusal_of(
        any, kOverStore,
        format("this rank is not in the list {}; let only members call it", list_of(ranks)));
  }
  const std::vector<int> members = fabric_ranks(impl, ranks);
  const auto creation =
      GroupIdentity::of_creation(options.id, impl.fabric->connection_number(), members);
  // A member is still registered under the identity of its group until all members have left the
  // group.
  if (is_in_group(impl, creation)) refuse_id(any, options.id, "this rank has a group of this id");
  NewGroupCall own{.digest = digest_of_ranks(members)};
  impl.system.random_bytes(std::as_writable_bytes(std::span(&own.stamp, 1)));
  NewGroup group{.name = options.name.empty() ? options.id : options.name,
                 .identity = creation.created({&own.stamp, 1}),
                 .creation = creation,
                 .members = values_of(ranks)};
  if (!has_others) return make_group(impl, std::move(group), deadline);
  const Status cut = cut_into(impl, group.members, group, own);
  const auto wait =
      impl.fabric->status_cells().show_wait(format("new_group_over_store of \"{}\"", options.id));
  bool has_pieces_free = false;    // no member uses this rank's pieces
  bool is_refused_by_all = false;  // all members have read the same keys
  try {
    const StoreExchange exchange(any, options, ranks);
    has_pieces_free = !exchange.put(own, deadline);
    if (has_pieces_free) {
      refuse_id(any, options.id,
                "the store still has what this rank wrote in an earlier call with this id");
    }
    const auto calls = exchange.gather(own, deadline);
    is_refused_by_all = true;
    check_memory(impl, cut, std::span<const NewGroupCall>(calls), group.members);
    is_refused_by_all = false;
    for (const NewGroupCall& call : calls) group.places.push_back(call.places);
    group.identity = creation.created(stamps_of(calls));
  } catch (const std::exception& thrown) {
    const Error error = error_of(thrown);
    // Members throw kInvalidArgument if their lists differ, and then no member uses another's
    // pieces.
    has_pieces_free =
        has_pieces_free || is_refused_by_all || error.code() == ErrorCode::kInvalidArgument;
    if (has_pieces_free && group.pieces) group.pieces->discard();
    // If a group of this id exists, its members may be using it, so that group must not fail.
    if (!is_refused_by_all && !is_in_group(impl, creation)) tell_giving_up(impl, creation, error);
    throw;
  }
  return make_group(impl, std::move(group), deadline);
}

}  // namespace cadre
