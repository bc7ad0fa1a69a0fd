#include "cadre/core/collective/net/link.h"

#include <algorithm>
#include <cstring>

namespace cadre {

std::optional<Fingerprint> CallHistory::find(uint64_t number,
                                             const OperationHeader& operation) const {
  const Call& call = calls_[number % kNumRemembered];
  const bool is_before = number > 0 && number < operation.number;
  return is_before && call.number == number ? std::optional(call.fingerprint) : std::nullopt;
}

void Link::begin_operation() {
  has_sent_header_ = false;
  has_announced_ = false;
  is_open_ = false;
}

void Link::start_send(const OperationHeader& operation, ConstBytes payload) {
  num_sent_ = 0;
  has_sent_header_ = true;
  // The unsent rest of an announcement is sent first.
  const size_t pending = unsent_.head.size();
  if (pending > 0) std::memmove(outbox_.data(), unsent_.head.data(), pending);
  std::ranges::copy(operation.encode(), outbox_.data() + pending);
  unsent_ = {ConstBytes(outbox_.data(), pending + OperationHeader::kBytes), payload};
}

Result<size_t> Link::advance_send() {
  const auto sent = channel_.try_send_parts(unsent_);
  if (sent.ok()) num_sent_ += unsent_.take_first(*sent).body.size();
  return sent;
}

Result<size_t> Link::receive(const OperationHeader& operation, Bytes target) {
  if (!is_open_) {
    while (!incoming_) {
      if (inbox_end_ < OperationHeader::kBytes) {
        // Receives no more than the caller expects, because the next operation may begin after it.
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
  while (!incoming_ && inbox_end_ >= OperationHeader::kBytes) {
    const auto header = OperationHeader::parse(ConstBytes(inbox_).first(OperationHeader::kBytes));
    if (!header.ok()) return header.error();
    if (header->kind != OperationHeader::Kind::kAnnouncement) {
      incoming_ = *header;
      return {};
    }
    const bool is_compared = announced_ && announced_->number <= operation.number;
    if (!announced_ || (is_compared && !has_contradiction(operation))) announced_ = *header;
    inbox_end_ -= OperationHeader::kBytes;
    std::memmove(inbox_.data(), inbox_.data() + OperationHeader::kBytes, inbox_end_);
  }
  return {};
}

// Returns whether the announcement differs from the operation that this rank called with its
// number. An announcement of a later operation is compared when this rank runs that operation.
bool Link::contradicts(const OperationHeader& announced, const OperationHeader& operation) const {
  if (announced.number > operation.number) return false;
  if (announced.number < operation.number) {
    return history_.find(announced.number, operation).value_or(announced.fingerprint) !=
           announced.fingerprint;
  }
  return announced.fingerprint != operation.fingerprint ||
         announced.algorithm != operation.algorithm;
}

std::optional<OperationHeader> Link::difference(const OperationHeader& operation) const {
  if (has_contradiction(operation)) return announced_;
  return incoming_ && *incoming_ != operation ? incoming_ : std::nullopt;
}

void Link::announce(OperationHeader operation) {
  if (has_announced_ || has_sent_header_ || !is_send_done()) return;
  has_announced_ = true;
  operation.kind = OperationHeader::Kind::kAnnouncement;
  std::ranges::copy(operation.encode(), outbox_.data());
  unsent_ = {ConstBytes(outbox_.data(), OperationHeader::kBytes), {}};
  // If the announcement is not sent completely here, the rest is sent before the next message.
  advance_announcement();
}

// An ended channel is no error here: the next operation that sends or receives on it reports the
// error.
void Link::advance_announcement() {
  if (!advance_send().ok()) unsent_ = {};
}

void Link::refuse(const OperationHeader& operation) {
  if (is_send_done()) refuse(channel_, operation);
}

void Link::refuse(Channel& channel, OperationHeader operation) {
  operation.kind = OperationHeader::Kind::kRefusal;
  const auto header = operation.encode();
  // An error is ignored: the operation fails on this rank whether or not the refusal can be sent.
  static_cast<void>(channel.try_send(header));
}

}  // namespace cadre
