#include "planted_bugs.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cadre/core/comm/messages/message_header.h"
#include "cadre/core/sim/simulated_socket.h"

namespace cadre::testing {
namespace {

const sim::Readiness& readiness_of(const os::Pollable& target) {
  return dynamic_cast<const sim::Readiness&>(target);
}

// A socket with the bug kWrongTag: some headers of messages are sent with the tag of the previous
// message.
class WrongTagSocket final : public os::Socket, public sim::Readiness {
 public:
  explicit WrongTagSocket(std::unique_ptr<os::Socket> inner) : inner_(std::move(inner)) {}

  // If a send accepts only a part of the data, the caller passes the rest again at the front of the
  // next send, followed by more data.
  Result<size_t> try_send(ConstBytes data) override {
    std::vector<std::byte> bytes(data.begin(), data.end());
    std::copy_n(owed_.begin(), std::min(owed_.size(), bytes.size()), bytes.begin());
    auto sent = inner_->try_send(bytes);
    if (!sent.ok() || *sent == 0) return sent;
    const bool is_rest = !owed_.empty();
    owed_ = is_rest ? std::move(bytes) : with_last_tag(std::move(bytes));
    owed_.erase(owed_.begin(), owed_.begin() + static_cast<ptrdiff_t>(*sent));
    return sent;
  }
  Result<size_t> try_recv(Bytes buffer) override { return inner_->try_recv(buffer); }
  Result<bool> try_send_segment(const os::SharedMemory& segment) override {
    return inner_->try_send_segment(segment);
  }
  Result<std::unique_ptr<os::SharedMemory>> try_recv_segment() override {
    return inner_->try_recv_segment();
  }
  Status check_peer_user() const override { return inner_->check_peer_user(); }
  void shutdown() override { inner_->shutdown(); }
  os::Address local_address() const override { return inner_->local_address(); }
  os::Address peer_address() const override { return inner_->peer_address(); }
  bool can_read() const override { return readiness_of(*inner_).can_read(); }
  bool can_write() const override { return readiness_of(*inner_).can_write(); }

 private:
  // A header of a message is passed to send either alone, or at the beginning of the bytes that
  // remain of its frame.
  std::vector<std::byte> with_last_tag(std::vector<std::byte> bytes) {
    if (bytes.size() < MessageHeader::kBytes) return bytes;
    const Bytes place = Bytes(bytes).first(MessageHeader::kBytes);
    auto header = MessageHeader::parse(place);
    if (!header.ok()) return bytes;
    std::swap(header->tag, last_tag_);
    std::ranges::copy(header->encode(), place.begin());
    return bytes;
  }

  const std::unique_ptr<os::Socket> inner_;
  std::vector<std::byte> owed_;  // the unsent rest of a header, with the tag of the previous header
  int32_t last_tag_ = 0;
};

class WrongTagListener final : public os::Listener, public sim::Readiness {
 public:
  explicit WrongTagListener(std::unique_ptr<os::Listener> inner) : inner_(std::move(inner)) {}

  Result<std::unique_ptr<os::Socket>> try_accept() override {
    auto accepted = inner_->try_accept();
    if (!accepted.ok() || *accepted == nullptr) return accepted;
    return std::unique_ptr<os::Socket>(
        std::make_unique<WrongTagSocket>(std::move(accepted).value()));
  }
  os::Address address() const override { return inner_->address(); }
  bool can_read() const override { return readiness_of(*inner_).can_read(); }
  bool can_write() const override { return false; }

 private:
  const std::unique_ptr<os::Listener> inner_;
};

class UsedSegment final : public sim::SimulatedSegment {
 public:
  using SimulatedSegment::SimulatedSegment;
  Status release(size_t, size_t) override { return {}; }
};

}  // namespace

Result<std::unique_ptr<os::Listener>> BuggySystem::listen(const os::Address& address) {
  auto listener = inner_.listen(address);
  if (!listener.ok() || bug_ != PlantedBug::kWrongTag) return listener;
  return std::unique_ptr<os::Listener>(
      std::make_unique<WrongTagListener>(std::move(listener).value()));
}

Result<std::unique_ptr<os::Socket>> BuggySystem::connect(const os::Address& address,
                                                         Deadline deadline) {
  auto socket = inner_.connect(address, deadline);
  if (!socket.ok() || bug_ != PlantedBug::kWrongTag) return socket;
  return std::unique_ptr<os::Socket>(std::make_unique<WrongTagSocket>(std::move(socket).value()));
}

Result<std::unique_ptr<os::SharedMemory>> BuggySystem::create_segment(size_t num_bytes) {
  auto created = inner_.create_segment(num_bytes);
  if (!created.ok() || bug_ != PlantedBug::kUsedPages) return created;
  const auto& memory = dynamic_cast<sim::SimulatedSegment&>(**created).memory();
  return std::unique_ptr<os::SharedMemory>(std::make_unique<UsedSegment>(memory));
}

// Replaces the round in a key: "cadre/7/..." becomes "cadre/1/...".
std::string BuggyStore::rename(std::string_view key) const {
  constexpr std::string_view kPrefix = "cadre/";
  if (bug_ != PlantedBug::kStaleRound || !key.starts_with(kPrefix)) return std::string(key);
  const size_t end = key.find('/', kPrefix.size());
  if (end == std::string_view::npos) return std::string(key);
  return std::string(kPrefix) + "1" + std::string(key.substr(end));
}

Result<wire::StoreResponse> BuggyStore::answer(wire::StoreRequest request, Deadline deadline) {
  if (bug_ == PlantedBug::kStaleRound && request.verb == wire::StoreVerb::kErase) {
    return wire::StoreResponse{.number = 1};
  }
  for (std::string& key : request.keys) key = rename(key);
  return inner_.call(std::move(request), deadline);
}

}  // namespace cadre::testing
