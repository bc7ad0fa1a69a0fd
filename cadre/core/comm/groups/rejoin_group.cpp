#include "cadre/core/comm/groups/rejoin_group.h"

#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/rendezvous.h"

namespace cadre {
namespace {

// Fails and closes the group. Returns the ranks of the group that are known to be lost afterwards.
std::vector<Rank> fail_and_close(Communicator& group) {
  // close() without a failure would publish that this rank has left, so the group is failed first.
  // The barrier returns when this rank has published the failure, which another thread may still be
  // composing.
  group.abort("rejoin() replaces this group");
  try {
    group.barrier();
  } catch (const Error&) {
    // The barrier throws the failure of the group, which the caller knows.
  }
  std::vector<Rank> lost = group.lost_ranks();
  try {
    group.close(group.system().deadline_in(kDefaultCloseTimeout));
  } catch (const Error&) {
    // close() throws the same failure again.
  }
  return lost;
}

// Returns whether the error means that a rank was lost or late, so that a group may be connected
// without that rank. All ranks throw any other error.
bool is_of_lost_rank(ErrorCode code) {
  return code == ErrorCode::kPeerLost || code == ErrorCode::kTimeout || code == ErrorCode::kAborted;
}

}  // namespace

std::unique_ptr<Communicator> rejoin_group(Communicator& group, const RejoinTimes& times) {
  os::System& system = group.system();
  Membership membership = group.membership();
  std::vector<Rank> lost = fail_and_close(group);
  const Deadline end = system.deadline_in(2 * (times.agreement + times.connection));
  std::string earlier;
  while (true) {
    const auto next =
        rejoin(system, membership, lost, end.earlier(system.deadline_in(times.agreement)));
    if (!next.ok()) throw earlier.empty() ? next.error() : next.error().with_context(earlier);
    membership = *next;
    try {
      return Communicator::connect(system, membership, group.options(),
                                   end.earlier(system.deadline_in(times.connection)));
    } catch (const Error& error) {
      if (!is_of_lost_rank(error.code()) || end.has_passed(system.now())) throw;
      earlier = format("rejoining again after \"{}\"", error.message());
    }
    lost.clear();  // the store reports, by wills, the ranks that have died since
  }
}

}  // namespace cadre
