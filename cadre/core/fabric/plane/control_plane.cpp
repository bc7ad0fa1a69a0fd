#include "cadre/core/fabric/plane/control_plane.h"

#include <utility>

#include "cadre/core/fabric/bootstrap/dial.h"
#include "cadre/core/fabric/plane/dialer.h"
#include "cadre/core/fabric/plane/plane_loop.h"
#include "cadre/core/fabric/plane/plane_state.h"

namespace cadre {

ControlPlane::ControlPlane(os::System& system, Setup setup)
    : system_(system),
      layout_(setup.layout),
      identity_(setup.identity),
      store_host_(setup.store_host),
      wake_up_(system.make_event()),
      state_(std::make_unique<PlaneState>(
          system, PlaneState::Identity{layout_->num_ranks(), setup.rank}, *wake_up_)),
      loop_(std::make_unique<PlaneLoop>(
          PlaneLoop::PlaneContext{
              system, {*layout_, identity_, store_host_}, *state_, *wake_up_, meter_},
          std::move(setup))) {
  // A world of one has no peers to watch.
  if (layout_->num_ranks() > 1) {
    thread_ = system_.spawn("cadre-monitor", [this] { loop_->run(); });
  }
}

ControlPlane::~ControlPlane() {
  close(Deadline(system_.now()));
}

void ControlPlane::attach(GroupKey group, std::shared_ptr<GroupEvents> events) {
  state_->attach(group, std::move(events));
}

void ControlPlane::detach(GroupKey group) {
  state_->detach(group);
}

bool ControlPlane::is_attached(GroupKey group) const {
  return state_->group(group) != nullptr;
}

void ControlPlane::tell_left(GroupKey group, uint64_t num_collectives, const Fingerprint& last) {
  state_->post(wire::GroupLeave{group, identity_.rank, num_collectives, last});
}

void ControlPlane::tell_failure(GroupFailure failure) {
  state_->post(std::move(failure));
}

std::vector<StatusAnswer> ControlPlane::ask(GroupKey group, std::span<const int> members,
                                            Deadline deadline) {
  return state_->ask(group, members, deadline);
}

std::vector<int> ControlPlane::lost_ranks() const {
  return state_->lost_ranks();
}

std::optional<LossReport> ControlPlane::loss_of(int rank) const {
  return state_->loss_of(rank);
}

bool ControlPlane::has_left(int rank) const {
  return state_->has_left(rank);
}

bool ControlPlane::is_cut_off(int peer, Deadline deadline) {
  const int self = identity_.rank;
  if (layout_->host_of(peer) == layout_->host_of(self)) return false;
  const Route route{{layout_->rank_address(self), self},
                    {layout_->rank_address(peer), peer},
                    store_host_,
                    wire::LinkPurpose::kData};
  const auto socket = open_socket(system_, route, deadline);
  return !socket.ok() && socket.error().code() == ErrorCode::kTimeout;
}

Result<std::unique_ptr<os::Socket>> ControlPlane::dial_data(int peer, Deadline deadline) {
  return dial(system_, *layout_, {identity_, store_host_}, peer, wire::LinkPurpose::kData,
              deadline);
}

void ControlPlane::close(Deadline deadline) {
  state_->leave(deadline);
  if (thread_ != nullptr) thread_->join();
  thread_.reset();
  loop_.reset();
}

}  // namespace cadre
