#include "cadre/collective/net/link.h"

#include <algorithm>
#include <cstring>

namespace cadre {

void Link::begin_operation() {
  has_sent_header_ = false;
  is_open_ = false;
}

void Link::start_send(const OperationHeader& operation, ConstBytes payload) {
  num_sent_ = 0;
  head_ = {};
  payload_ = payload;
  if (has_sent_header_) return;
  has_sent_header_ = true;
  const auto header = operation.encode();
  head_payload_ = std::min(payload.size(), kInlineBytes);
  std::memcpy(outbox_.data(), header.data(), header.size());
  if (head_payload_ > 0) {
    std::memcpy(outbox_.data() + header.size(), payload.data(), head_payload_);
  }
  head_ = ConstBytes(outbox_.data(), header.size() + head_payload_);
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
    if (!incoming_) {
      // Not beyond what the caller expects: behind it the next operation may begin.
      const size_t want = OperationHeader::kBytes + std::min(target.size(), kInlineBytes);
      const auto received = channel_.try_recv(Bytes(inbox_).subspan(inbox_end_, want - inbox_end_));
      if (!received.ok()) return received;
      inbox_end_ += *received;
      CADRE_RETURN_IF_ERROR(parse_incoming());
    }
    if (!incoming_ || difference(operation)) return size_t{0};
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

Status Link::peek() {
  const auto received =
      channel_.try_recv(Bytes(inbox_).subspan(inbox_end_, OperationHeader::kBytes - inbox_end_));
  if (!received.ok()) {
    has_ended_ = true;
    return {};
  }
  inbox_end_ += *received;
  return parse_incoming();
}

Status Link::parse_incoming() {
  if (inbox_end_ < OperationHeader::kBytes) return {};
  const auto header = OperationHeader::parse(ConstBytes(inbox_).first(OperationHeader::kBytes));
  if (!header.ok()) return header.error();
  incoming_ = *header;
  return {};
}

std::optional<OperationHeader> Link::difference(const OperationHeader& operation) const {
  return incoming_ && *incoming_ != operation ? incoming_ : std::nullopt;
}

void Link::refuse(OperationHeader operation) {
  if (!is_send_done()) return;
  operation.kind = OperationHeader::Kind::kRefusal;
  const auto header = operation.encode();
  // Best effort: the operation fails on this rank whether or not the peer can be told.
  static_cast<void>(channel_.try_send(header));
}

}  // namespace cadre
