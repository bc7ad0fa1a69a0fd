#include "cadre/collective/net/link.h"

#include <algorithm>
#include <cstring>

namespace cadre {

void Link::begin_operation(const OperationHeader& operation) {
  has_sent_header_ = false;
  has_announced_ = false;
  is_open_ = false;
  remembered_[operation.number % kNumRemembered] = {operation.number, operation.fingerprint};
  drop_announcement(operation);
}

void Link::start_send(const OperationHeader& operation, ConstBytes payload) {
  num_sent_ = 0;
  has_sent_header_ = true;
  // What of an announcement has not left yet goes ahead.
  const size_t pending = head_.size();
  if (pending > 0) std::memmove(outbox_.data(), head_.data(), pending);
  const auto header = operation.encode();
  head_payload_ = std::min(payload.size(), kInlineSendBytes);
  std::byte* const end_of_header = std::ranges::copy(header, outbox_.data() + pending).out;
  if (head_payload_ > 0) std::memcpy(end_of_header, payload.data(), head_payload_);
  head_ = ConstBytes(outbox_.data(), pending + header.size() + head_payload_);
  payload_ = payload.subspan(head_payload_);
}

Result<size_t> Link::advance_send() {
  const bool is_head = !head_.empty();
  ConstBytes& next = is_head ? head_ : payload_;
  const auto sent = channel_.try_send(next);
  if (!sent.ok()) return sent;
  next = next.subspan(*sent);
  // The inline payload was copied, so all of it counts as gone only with the last byte of the head.
  if (!is_head) num_sent_ += *sent;
  if (is_head && head_.empty()) num_sent_ += head_payload_;
  return sent;
}

Result<size_t> Link::receive(const OperationHeader& operation, Bytes target) {
  if (!is_open_) {
    while (!incoming_) {
      if (inbox_end_ < OperationHeader::kBytes) {
        // Not beyond what the caller expects: behind it the next operation may begin.
        const size_t want = OperationHeader::kBytes + std::min(target.size(), kInlineBytes);
        const auto received =
            channel_.try_recv(Bytes(inbox_).subspan(inbox_end_, want - inbox_end_));
        if (!received.ok() || *received == 0) return received;
        inbox_end_ += *received;
      }
      CADRE_RETURN_IF_ERROR(parse_incoming(operation));
    }
    if (difference(operation)) return size_t{0};
    is_open_ = true;
    incoming_.reset();
    inbox_begin_ = OperationHeader::kBytes;
  }
  const size_t staged = take_staged(target);
  if (staged > 0 || target.empty()) return staged;
  return channel_.try_recv(target);
}

size_t Link::take_staged(Bytes target) {
  const size_t size = std::min(target.size(), inbox_end_ - inbox_begin_);
  if (size > 0) std::memcpy(target.data(), inbox_.data() + inbox_begin_, size);
  inbox_begin_ += size;
  if (inbox_begin_ == inbox_end_) inbox_begin_ = inbox_end_ = 0;
  return size;
}

Status Link::peek(const OperationHeader& operation) {
  const auto received =
      channel_.try_recv(Bytes(inbox_).subspan(inbox_end_, OperationHeader::kBytes - inbox_end_));
  if (!received.ok()) {
    has_ended_ = true;
    return {};
  }
  inbox_end_ += *received;
  return parse_incoming(operation);
}

Status Link::parse_incoming(const OperationHeader& operation) {
  if (inbox_end_ < OperationHeader::kBytes) return {};
  const auto header = OperationHeader::parse(ConstBytes(inbox_).first(OperationHeader::kBytes));
  if (!header.ok()) return header.error();
  incoming_ = *header;
  drop_announcement(operation);
  return {};
}

// An announcement of what this rank runs, or ran, tells nothing new. One of a later operation waits
// for its turn; any other stays, as a difference.
void Link::drop_announcement(const OperationHeader& operation) {
  if (!incoming_ || incoming_->kind != OperationHeader::Kind::kAnnouncement) return;
  const uint64_t number = incoming_->number;
  if (number > operation.number) return;
  if (number == operation.number && incoming_->algorithm != operation.algorithm) return;
  const Fingerprint called = number == operation.number
                                 ? operation.fingerprint
                                 : remembered(number, operation).value_or(incoming_->fingerprint);
  if (called != incoming_->fingerprint) return;
  incoming_.reset();
  inbox_end_ -= OperationHeader::kBytes;
  std::memmove(inbox_.data(), inbox_.data() + OperationHeader::kBytes, inbox_end_);
}

std::optional<OperationHeader> Link::difference(const OperationHeader& operation) const {
  return incoming_ && *incoming_ != operation ? incoming_ : std::nullopt;
}

void Link::announce(OperationHeader operation) {
  if (has_announced_ || has_sent_header_ || !is_send_done()) return;
  has_announced_ = true;
  operation.kind = OperationHeader::Kind::kAnnouncement;
  std::ranges::copy(operation.encode(), outbox_.data());
  head_ = ConstBytes(outbox_.data(), OperationHeader::kBytes);
  head_payload_ = 0;
  // What does not leave now goes ahead of the next message; a channel that has ended is found by
  // whoever needs it.
  static_cast<void>(advance_send());
}

std::optional<Fingerprint> Link::remembered(uint64_t number,
                                            const OperationHeader& operation) const {
  const Call& call = remembered_[number % kNumRemembered];
  const bool is_before = number > 0 && number < operation.number;
  return is_before && call.number == number ? std::optional(call.fingerprint) : std::nullopt;
}

void Link::refuse(OperationHeader operation) {
  if (!is_send_done()) return;
  operation.kind = OperationHeader::Kind::kRefusal;
  const auto header = operation.encode();
  // Best effort: the operation fails on this rank whether or not the peer can be told.
  static_cast<void>(channel_.try_send(header));
}

}  // namespace cadre
