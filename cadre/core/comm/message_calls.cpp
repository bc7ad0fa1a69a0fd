#include "cadre/core/comm/message_calls.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/checks.h"
#include "cadre/core/comm/communicator_impl.h"

namespace cadre {
namespace {

constexpr std::string_view kNoMessages = "send messages in a group whose ranks all exist";

// The values that one rank contributes when all ranks reserve a message space.
struct Reservation {
  uint64_t num_reserved = 0;
  uint64_t user_digest = 0;
};

// Throws if the arguments of the message are wrong whatever the other ranks pass.
void check_message(const MessageCall& message, const Communicator& group, std::string_view call) {
  const bool is_from_any = message.kind == OpKind::kRecv && message.peer == kAnySource;
  const std::string_view kind = is_from_any ? "recv_from_any" : to_string(message.kind);
  const std::string_view name = call.empty() ? kind : call;
  if (message.kind != OpKind::kSend && message.kind != OpKind::kRecv) {
    throw refusal_of(group, name, format("{} is no message; expected send or recv", message.kind));
  }
  if (!is_from_any) {
    check_peer(group, name, message.peer);
  } else if (group.world_size() == 1) {
    throw refusal_of(group, name, "a world of one has no other rank");
  }
  check_elements(group, name, message.kind == OpKind::kSend ? message.in : message.out,
                 message.dtype);
}

std::string_view name_of_call(const MessageCall& message, const CollectiveOptions& options) {
  return options.call.empty() ? to_string(message.kind) : options.call;
}

// Returns the options with their timeout as a deadline.
CollectiveOptions with_deadline(const Communicator& group, const MessageCall& message,
                                CollectiveOptions options) {
  options.deadline = deadline_of(group, name_of_call(message, options), options);
  options.timeout.reset();
  return options;
}

}  // namespace

// A rank on which an earlier wrapper could not be created has reserved fewer spaces than the other
// ranks. So the new number is computed from the maximum of all ranks' counts, which makes it unused
// on every rank.
MessageSpace reserve_message_space(Communicator& group, std::string_view user,
                                   const CollectiveOptions& options) {
  Communicator::Impl& impl = CommunicatorParts::impl_of(group);
  const Reservation own{impl.num_message_spaces.load(std::memory_order_relaxed), fnv1a(user)};
  std::vector<Reservation> all(static_cast<size_t>(group.world_size()));
  CollectiveOptions named = options;
  if (named.call.empty()) named.call = user;
  group.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)),
                   DType::kInt64, named);
  uint64_t number = 0;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].user_digest != all[0].user_digest) {
      throw refusal_of(
          group, named.call,
          format("rank {} makes a different wrapper on this group than rank 0: make the "
                 "wrappers of a group in the same order on all ranks",
                 rank))
          .with_culprit(Rank(static_cast<int>(rank)));
    }
    number = std::max(number, all[rank].num_reserved + 1);
  }
  impl.num_message_spaces.store(static_cast<uint32_t>(number), std::memory_order_relaxed);
  return MessageSpace::of_number(static_cast<uint32_t>(number), user);
}

Rank run_message(const Communicator& group, const MessageSpace& space, const MessageCall& message,
                 const CollectiveOptions& options, SendGate is_written) {
  Communicator::Impl& impl = CommunicatorParts::impl_of(group);
  check_message(message, group, options.call);
  impl.check_open(name_of_call(message, options));
  check_has_peers(group, name_of_call(message, options), kNoMessages);
  return impl.messages->run(message, space, with_deadline(group, message, options),
                            std::move(is_written));
}

std::vector<Work> issue_messages(const Communicator& group, const MessageSpace& space,
                                 std::span<const MessageCall> messages,
                                 const CollectiveOptions& options, const SendGate& is_written) {
  Communicator::Impl& impl = CommunicatorParts::impl_of(group);
  for (const MessageCall& message : messages) check_message(message, group, options.call);
  if (messages.empty()) return {};  // no error even in a world of one, which has no peers
  impl.check_open(name_of_call(messages.front(), options));
  check_has_peers(group, name_of_call(messages.front(), options), kNoMessages);
  return impl.messages->issue(messages, space, with_deadline(group, messages.front(), options),
                              is_written);
}

}  // namespace cadre
