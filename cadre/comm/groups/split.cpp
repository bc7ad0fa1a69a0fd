#include "cadre/comm/groups/split.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <exception>
#include <numeric>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/base/fnv1a.h"
#include "cadre/base/format.h"
#include "cadre/comm/calls/checks.h"
#include "cadre/comm/communicator_impl.h"
#include "cadre/comm/groups/make_group.h"
#include "cadre/comm/queue/thrown_error.h"
#include "cadre/rendezvous/missing_ranks.h"
#include "cadre/wire/byte_codec.h"

namespace cadre {
namespace {

constexpr Duration kLookForLosses = std::chrono::milliseconds(500);
constexpr std::string_view kOverStore = "new_group_over_store";

std::string list(std::span<const Rank> ranks) {
  std::string text;
  for (const Rank rank : ranks) text += format("{}{}", text.empty() ? "" : ", ", rank);
  return format("[{}]", text);
}

[[noreturn]] void refuse_id(const Communicator& any, const std::string& id, std::string_view why) {
  throw refusal_of(any, kOverStore,
                   format("the id \"{}\" was used before, {}: give each group, and each new try "
                          "to make one, an id of its own",
                          id, why));
}

[[noreturn]] void refuse_list(const Communicator& parent, std::span<const Rank> ranks, int other) {
  throw refusal_of(parent, "new_group",
                   format("this rank wants the ranks {}, rank {} wants others: every rank must "
                          "name the same ranks in the same order",
                          list(ranks), other));
}

void check_list(std::string_view call, const Communicator& parent, std::span<const Rank> ranks) {
  if (ranks.empty()) throw refusal_of(parent, call, "the list of ranks is empty");
  std::vector<bool> is_named(static_cast<size_t>(parent.world_size()));
  for (const Rank rank : ranks) {
    if (rank < 0 || rank >= parent.world_size()) {
      throw refusal_of(parent, call,
                       format("rank {} of the list {} is not in the group of {} ranks", rank,
                              list(ranks), parent.world_size()));
    }
    if (is_named[static_cast<size_t>(rank.value)]) {
      throw refusal_of(parent, call, format("rank {} is in the list {} twice", rank, list(ranks)));
    }
    is_named[static_cast<size_t>(rank.value)] = true;
  }
}

std::vector<int> values_of(std::span<const Rank> ranks) {
  std::vector<int> values;
  for (const Rank rank : ranks) values.push_back(rank.value);
  return values;
}

std::vector<int> all_ranks(const Communicator::Impl& group) {
  std::vector<int> ranks(static_cast<size_t>(group.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

uint64_t digest(std::span<const Rank> ranks) {
  Fnv1a hash;
  for (const Rank rank : ranks) hash.add(static_cast<uint64_t>(rank.value));
  return hash.value();
}

uint64_t digest(std::string_view text) {
  Fnv1a hash;
  hash.add(text);
  return hash.value();
}

// The arguments of one rank in a split, as exchanged.
struct SplitCall {
  int64_t has_color = 0;
  int64_t color = 0;
  int64_t key = 0;
  uint64_t name_digest = 0;
  std::array<char, 32> name{};  // truncated, padded with zeros
  int64_t is_short = 0;         // whether the rank has no memory for its pieces
  GroupPlaces places;           // of the pieces that the rank has cut

  bool is_of(int64_t wanted) const { return has_color == 1 && color == wanted; }
  std::string quoted_name() const {
    const std::string text(name.data(), std::find(name.begin(), name.end(), '\0'));
    return format("\"{}{}\"", text, text.size() == name.size() ? "..." : "");
  }
};

// The arguments of one rank in new_group, as exchanged.
struct NewGroupCall {
  uint64_t digest = 0;  // of the list of ranks
  uint64_t stamp = 0;   // random, so that two calls of one rank differ in a store
  int64_t is_short = 0;
  GroupPlaces places;
};

// Cuts this rank's pieces and records the places, or that memory is short, in its call.
template <typename Call>
Status cut_into(const Communicator::Impl& parent, const std::vector<int>& candidates,
                NewGroup& group, Call& call) {
  Status status = cut_pieces(parent, candidates, group);
  call.is_short = status.ok() ? 0 : 1;
  if (group.pieces) call.places = group.pieces->places();
  return status;
}

// `culprit` is a rank of the group.
Error error_of_rank(const Communicator::Impl& group, ErrorCode code, int culprit,
                    std::string message) {
  return Error(code, std::move(message))
      .with_details({.culprit = Rank(culprit),
                     .culprit_world_rank = Rank(group.monitor->roster().world_rank(culprit))});
}

// Every rank of the parent sees which ranks are short of memory. So all of them refuse, and the
// parent stays usable.
template <typename Call>
void check_memory(const Communicator::Impl& parent, const Status& own, std::span<const Call> calls,
                  std::span<const int> callers) {
  if (!own.ok()) throw own.error();
  for (size_t i = 0; i < calls.size(); ++i) {
    if (calls[i].is_short == 0) continue;
    throw error_of_rank(
        parent, ErrorCode::kUnavailable, callers[i],
        format("the new group was not made: {} is short of shared memory for its part of it; see "
               "its error, free symmetric memory or groups there and try again",
               parent.monitor->roster().describe(callers[i])));
  }
}

// Publishes a failure of the new group when this rank gives up creating it. Members that have
// already created the group, or create it later from what was exchanged, fail with it. `group` is
// the parent, or the group that contains all members.
void tell_giving_up(const Communicator::Impl& group, const std::string& id, const Error& error) {
  if (group.fabric->plane() == nullptr) return;
  const int self = group.fabric->rank().value;
  const Rank told = error.details().culprit.value_or(group.rank);
  // A store of the program may name any rank.
  const bool is_member = told >= 0 && told < group.world_size;
  const int culprit = is_member ? told.value : group.rank.value;
  const std::string cause =
      format("{} gave up making the group: {}", group.monitor->roster().describe(group.rank.value),
             error.message());
  group.fabric->plane()->tell_failure(
      {key_of(id), self,
       wire::AbortNotice{error.code(), group.members.ranks[static_cast<size_t>(culprit)], self,
                         cause, cause}});
}

// Whether this process has a group of this id, or had one that some member has not left yet.
bool is_in_group(const Communicator::Impl& impl, const std::string& id) {
  const ControlPlane* const plane = impl.fabric->plane();
  return plane != nullptr && plane->is_attached(key_of(id));
}

// A member of a failed group throws its failure instead of calling, so nobody waits for it.
void check_failure(const Communicator::Impl& group) {
  if (group.monitor->has_failed()) throw group.monitor->error();
}

// Before a piece of memory is cut: of a call that is refused here no rank knows, so the piece of a
// later refusal could not be used again.
void check_usable(const Communicator::Impl& group, std::string_view call) {
  group.check_open(call);
  check_failure(group);
}

// The exchange through a store, for members without a parent group that all its ranks call.
class StoreExchange {
 public:
  // `ranks` are the members, of which `any` is one.
  StoreExchange(const Communicator& any, const StoreGroupOptions& options,
                std::span<const Rank> ranks)
      : any_(any),
        group_(CommunicatorParts::impl_of(any)),
        store_(*options.store),
        id_(options.id),
        ranks_(ranks) {
    const std::string prefix = format("cadre/{}/{}", group_.members.membership.round, id_);
    for (const Rank rank : ranks) {
      keys_.push_back(
          format("{}/member/{}", prefix, group_.members.ranks[static_cast<size_t>(rank.value)]));
    }
    count_key_ = prefix + "/num_read";
  }

  // Publishes `own`. False if this rank's key exists already, for example from a failed try; then
  // `own` is not written, so no member can read it.
  bool put(const NewGroupCall& own, Deadline deadline) const {
    const auto self = std::ranges::find(ranks_, any_.rank()) - ranks_.begin();
    const std::string text(wire::as_text(std::as_bytes(std::span(&own, 1))));
    return store_.compare_set(keys_[static_cast<size_t>(self)], "", text, deadline)
               .value_or_throw() == text;
  }

  // The calls of all members, in their order. REQUIRES: put() has succeeded.
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
    throw refusal_of(
        any_, kOverStore,
        format("this rank wants the ranks {} in \"{}\", rank {} wants others: every member must "
               "name the same ranks in the same order",
               list(ranks_), id_, ranks_[i]));
  }

  // Waits for all keys. Periodically checks the keys that exist, and whether a missing member is
  // lost or has left.
  void await_all(const NewGroupCall& own, Deadline deadline) const {
    std::optional<Rank> gone;
    while (true) {
      const Deadline look = deadline.earlier(group_.system.deadline_in(kLookForLosses));
      const Status status = store_.wait(keys_, look);
      if (status.ok()) return;
      if (status.error().code() != ErrorCode::kTimeout) throw status.error();
      check_failure(group_);
      const std::vector<Rank> missing = read_present(own);
      // A member may have written its key before it ended, so the keys were read once more after
      // the end was known.
      if (gone && std::ranges::find(missing, *gone) != missing.end()) {
        throw ended_member(*gone);
      }
      gone = first_gone(missing);
      if (deadline.has_passed(group_.system.now())) throw missing_member(missing);
    }
  }

  // The members without a key. Throws if a key that exists does not fit this rank's call.
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
        format(
            "new_group_over_store of \"{}\": {} {} before it called it: let every member call it "
            "before it closes its groups",
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
        format("new_group_over_store of \"{}\": {} did not call it before the deadline: let all "
               "members call it with this id and this list, or give more time; a new try needs a "
               "new id",
               id_, names));
  }

  // Best effort: the group exists by now, and remaining keys do no harm.
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
  std::vector<std::string> keys_;  // by member
  std::string count_key_;
};

// Gathers the calls of all ranks of the parent in rank order. If that fails here, other ranks may
// have created the new group `id` already, so the failure is published.
template <typename T>
std::vector<T> gather(Communicator& parent, std::string_view call, const T& mine,
                      const std::optional<std::string>& id, Deadline deadline) try {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(int64_t) == 0);
  std::vector<T> all(static_cast<size_t>(parent.world_size()));
  parent.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)),
                    DType::kInt64, {.deadline = deadline, .call = call});
  return all;
} catch (const std::exception& thrown) {
  if (id) tell_giving_up(CommunicatorParts::impl_of(parent), *id, error_of(thrown));
  throw;
}

SplitCall call_of(const SplitOptions& options) {
  SplitCall call{.has_color = options.color ? 1 : 0,
                 .color = options.color.value_or(0),
                 .key = options.key,
                 .name_digest = digest(options.name)};
  std::copy_n(options.name.begin(), std::min(options.name.size(), call.name.size()),
              call.name.begin());
  return call;
}

// Every rank of the parent sees all calls, so all of them throw the same error.
void check_names(const Communicator& parent, std::span<const SplitCall> calls) {
  for (size_t i = 0; i < calls.size(); ++i) {
    for (size_t first = 0; calls[i].has_color == 1 && first < i; ++first) {
      if (!calls[first].is_of(calls[i].color)) continue;
      if (calls[first].name_digest == calls[i].name_digest) break;
      throw refusal_of(
          parent, "split",
          format("rank {} names the group of color {} {}, rank {} names it {}: let all ranks of a "
                 "color give one name",
                 first, calls[i].color, calls[first].quoted_name(), i, calls[i].quoted_name()));
    }
  }
}

}  // namespace

std::unique_ptr<Communicator> split(Communicator& parent, const SplitOptions& given,
                                    Deadline deadline) {
  SplitOptions options = given;
  if (options.color.value_or(0) < 0) options.color.reset();
  const uint64_t number = parent.num_collectives() + 1;
  const Communicator::Impl& impl = CommunicatorParts::impl_of(parent);
  check_usable(impl, "split");
  NewGroup group;
  SplitCall call = call_of(options);
  const std::vector<int> all = all_ranks(impl);
  const Status cut = options.color ? cut_into(impl, all, group, call) : Status();
  std::optional<std::string> id;
  if (options.color) id = format("{}/{}.{}", parent.id(), number, *options.color);
  const std::vector<SplitCall> calls = gather(parent, "split", call, id, deadline);
  try {
    check_memory(impl, cut, std::span<const SplitCall>(calls), all);
    check_names(parent, calls);
  } catch (const Error&) {
    if (group.pieces) group.pieces->discard();
    throw;
  }
  if (!options.color) return nullptr;
  for (int rank = 0; rank < parent.world_size(); ++rank) {
    if (calls[static_cast<size_t>(rank)].is_of(*options.color)) group.members.push_back(rank);
  }
  std::stable_sort(group.members.begin(), group.members.end(), [&calls](int a, int b) {
    return calls[static_cast<size_t>(a)].key < calls[static_cast<size_t>(b)].key;
  });
  for (const int member : group.members) {
    group.places.push_back(calls[static_cast<size_t>(member)].places);
  }
  group.label = {options.name, *id};
  if (group.label.name.empty()) {
    group.label.name = format("{}/{}.{}", parent.name(), number, *options.color);
  }
  return make_group(impl, std::move(group));
}

std::unique_ptr<Communicator> new_group(Communicator& parent, std::span<const Rank> ranks,
                                        Deadline deadline) {
  check_list("new_group", parent, ranks);
  const uint64_t number = parent.num_collectives() + 1;
  const Communicator::Impl& impl = CommunicatorParts::impl_of(parent);
  check_usable(impl, "new_group");
  const bool is_member = std::ranges::find(ranks, parent.rank()) != ranks.end();
  NewGroup group;
  NewGroupCall call{.digest = digest(ranks)};
  const Status cut = is_member ? cut_into(impl, values_of(ranks), group, call) : Status();
  const std::string id = format("{}/{}", parent.id(), number);
  const auto calls =
      gather(parent, "new_group", call, is_member ? std::optional(id) : std::nullopt, deadline);
  const auto other = std::ranges::find_if(
      calls, [&](const NewGroupCall& theirs) { return theirs.digest != call.digest; });
  try {
    if (other != calls.end()) refuse_list(parent, ranks, static_cast<int>(other - calls.begin()));
    check_memory(impl, cut, std::span<const NewGroupCall>(calls), all_ranks(impl));
  } catch (const Error&) {
    if (group.pieces) group.pieces->discard();
    throw;
  }
  if (!is_member) return nullptr;
  group.members = values_of(ranks);
  for (const int member : group.members) {
    group.places.push_back(calls[static_cast<size_t>(member)].places);
  }
  group.label = {format("{}/{}", parent.name(), number), id};
  return make_group(impl, std::move(group));
}

std::unique_ptr<Communicator> new_group_over_store(const Communicator& any,
                                                   std::span<const Rank> ranks,
                                                   const StoreGroupOptions& options,
                                                   Deadline deadline) {
  check_list(kOverStore, any, ranks);
  const bool is_alone = ranks.size() == 1;
  if (options.store == nullptr && !is_alone) {
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
        format("this rank is not in the list {}; let only members call it", list(ranks)));
  }
  // A group of this rank keeps its id until all members have left it.
  if (is_in_group(impl, options.id)) refuse_id(any, options.id, "this rank has a group of this id");
  NewGroup group{.label = {options.name.empty() ? options.id : options.name, options.id},
                 .members = values_of(ranks),
                 .pieces = {},
                 .places = {}};
  if (is_alone) return make_group(impl, std::move(group));
  NewGroupCall own{.digest = digest(ranks)};
  impl.system.random_bytes(std::as_writable_bytes(std::span(&own.stamp, 1)));
  const Status cut = cut_into(impl, group.members, group, own);
  const auto wait =
      impl.fabric->status_cells().show_wait(format("new_group_over_store of \"{}\"", options.id));
  bool has_pieces_free = false;  // no member uses this rank's pieces
  try {
    const StoreExchange exchange(any, options, ranks);
    has_pieces_free = !exchange.put(own, deadline);
    if (has_pieces_free) {
      refuse_id(any, options.id, "an earlier call of this rank is in the store");
    }
    const auto calls = exchange.gather(own, deadline);
    has_pieces_free = true;  // every member that reads the same keys refuses as well
    check_memory(impl, cut, std::span<const NewGroupCall>(calls), group.members);
    for (const NewGroupCall& call : calls) group.places.push_back(call.places);
  } catch (const std::exception& thrown) {
    const Error error = error_of(thrown);
    // Lists that differ are refused by every member that lists this rank, so none uses its pieces.
    has_pieces_free = has_pieces_free || error.code() == ErrorCode::kInvalidArgument;
    if (has_pieces_free && group.pieces) group.pieces->discard();
    // If a group of this id exists, its members may be using it, so it must not fail.
    if (!is_in_group(impl, options.id)) tell_giving_up(impl, options.id, error);
    throw;
  }
  return make_group(impl, std::move(group));
}

}  // namespace cadre
