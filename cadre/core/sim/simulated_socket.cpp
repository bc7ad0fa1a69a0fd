#include "cadre/core/sim/simulated_socket.h"

#include <algorithm>

#include "cadre/core/base/format.h"

namespace cadre::sim {

SimulatedSocket::SimulatedSocket(Network& network, std::shared_ptr<Connection> connection, int side)
    : network_(network), connection_(std::move(connection)), side_(side) {}

SimulatedSocket::~SimulatedSocket() {
  connection_->close(side_);
}

Result<size_t> SimulatedSocket::try_send(ConstBytes data) {
  CADRE_RETURN_IF_ERROR(point(cadre::format("send {} bytes", data.size())));
  return connection_->try_send(side_, data);
}

Result<size_t> SimulatedSocket::try_recv(Bytes buffer) {
  CADRE_RETURN_IF_ERROR(point(cadre::format("receive up to {} bytes", buffer.size())));
  if (buffer.empty()) return size_t{0};
  return connection_->try_recv(side_, buffer);
}

Result<bool> SimulatedSocket::try_send_segment(const os::SharedMemory& segment) {
  CADRE_RETURN_IF_ERROR(require_unix());
  const auto* simulated = dynamic_cast<const SimulatedSegment*>(&segment);
  if (simulated == nullptr) {
    return Error(ErrorCode::kInvalidArgument,
                 "send a segment: it was made by another kind of System than this socket");
  }
  CADRE_RETURN_IF_ERROR(point("send a segment"));
  return connection_->try_send_segment(side_, simulated->memory());
}

Result<std::unique_ptr<os::SharedMemory>> SimulatedSocket::try_recv_segment() {
  CADRE_RETURN_IF_ERROR(require_unix());
  CADRE_RETURN_IF_ERROR(point("receive a segment"));
  auto memory = connection_->try_recv_segment(side_);
  if (!memory.ok()) return memory.error();
  if (!*memory) return std::unique_ptr<os::SharedMemory>();
  return std::unique_ptr<os::SharedMemory>(std::make_unique<SimulatedSegment>(*std::move(memory)));
}

void SimulatedSocket::shutdown() {
  network_.scheduler().count_point("shutdown");
  connection_->shutdown(side_);
}

Status SimulatedSocket::point(std::string_view what) {
  network_.scheduler().step(what);
  if (!network_.scheduler().is_caller_dead()) return {};
  return Error(ErrorCode::kPeerLost, "this rank was killed");
}

Status SimulatedSocket::require_unix() const {
  if (local_address().kind == os::Address::Kind::kUnix) return {};
  return Error(
      ErrorCode::kInvalidArgument,
      cadre::format("cannot pass a shared-memory segment over {}: only unix sockets carry one",
                    local_address().to_string()));
}

SimulatedListener::SimulatedListener(Network& network, std::shared_ptr<ListenPoint> point)
    : network_(network), point_(std::move(point)) {}

SimulatedListener::~SimulatedListener() {
  network_.close(*point_);
}

Result<std::unique_ptr<os::Socket>> SimulatedListener::try_accept() {
  network_.scheduler().step("accept");
  if (point_->backlog.empty()) return std::unique_ptr<os::Socket>();
  std::shared_ptr<Connection> connection = std::move(point_->backlog.front());
  point_->backlog.erase(point_->backlog.begin());
  network_.scheduler().touch(point_->rank);
  return std::unique_ptr<os::Socket>(
      std::make_unique<SimulatedSocket>(network_, std::move(connection), 1));
}

void SimulatedEvent::add_poller(int rank) {
  if (std::ranges::find(pollers_, rank) == pollers_.end()) pollers_.push_back(rank);
}

void SimulatedEvent::set(bool is_set) {
  is_set_ = is_set;
  for (const int rank : pollers_) scheduler_.touch(rank);
}

void SimulatedEvent::notify() {
  scheduler_.count_point("notify");
  set(true);
}

}  // namespace cadre::sim
