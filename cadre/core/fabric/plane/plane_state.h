// The state that the threads of a process share with the thread of its control plane: the known
// events, the attached groups, and the open status questions.
//
// Threads: any, except for the methods of the plane's thread. Blocking: ask(), until its deadline.
// Lifetime: borrows the System and the event. Errors: none.
// Events are delivered to groups without holding a lock: deliver() delivers new events, and
// attach() those that arrived earlier.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/fabric/plane/control_plane.h"
#include "cadre/core/fabric/plane/event_log.h"
#include "cadre/core/fabric/plane/group_events.h"
#include "cadre/core/os/system.h"

namespace cadre {

class PlaneState {
 public:
  struct Identity {
    int num_ranks = 0;
    int rank = 0;
  };
  // `wake_up` is notified when the plane's thread has something to do.
  PlaneState(os::System& system, Identity identity, os::Event& wake_up);

  void attach(GroupKey group, std::shared_ptr<GroupEvents> events);
  void detach(GroupKey group);
  // Queues an event that the plane's thread sends to the other ranks.
  void post(wire::Event event);
  std::vector<StatusAnswer> ask(GroupKey group, std::span<const int> members, Deadline deadline);
  std::vector<int> lost_ranks() const;
  std::optional<LossReport> loss_of(int rank) const;
  bool has_left(int rank) const;
  // Makes the plane's thread announce to all ranks that this process leaves, wait until the
  // deadline for their acknowledgements, and end.
  void leave(Deadline deadline);

  // Only the plane's thread calls the methods from here on.
  struct Orders {
    std::vector<wire::Event> events;  // the events in the order in which they were posted
    std::optional<Deadline> leave_by;
  };
  Orders take_orders();
  // Returns true if the event is new; the next deliver() delivers it to its groups.
  bool learn(const wire::Event& event, int from);
  void take_answer(const wire::StatusAnswer& answer);
  void deliver();
  // Ends all open ask() calls, and makes later ones return at once.
  void end();
  // Returns null if the group is not attached.
  std::shared_ptr<GroupEvents> group(GroupKey key) const;
  bool is_lost(int rank) const;
  std::vector<bool> presence() const;
  // Calls EventLog::all() under the lock.
  std::vector<wire::Event> all_events();
  std::vector<wire::Event> events_told_by(int rank);

 private:
  struct Delivery {
    // The receiver of the group's events. Shared with its owner, which may detach it during a
    // delivery.
    std::shared_ptr<GroupEvents> group;
    wire::Event event;
  };
  struct Question {
    // The activities in the answers that have arrived; the key is the rank.
    std::map<int, wire::Activity> answers;
  };

  void call(const Delivery& delivery) const;
  // REQUIRES: mutex_ is locked.
  void queue_deliveries(const wire::Event& event);
  // REQUIRES: mutex_ is locked.
  bool is_answered(const Question& question, std::span<const int> members) const;
  bool await_answers(uint64_t number, std::span<const int> members, Deadline deadline);
  void wake_observers();

  os::System& system_;
  const int rank_;
  os::Event& wake_up_;

  mutable std::mutex mutex_;
  EventLog log_;
  std::map<GroupKey, std::shared_ptr<GroupEvents>> groups_;
  Orders orders_;
  std::vector<Delivery> deliveries_;
  // The questions that this rank has asked; the key is their number.
  std::map<uint64_t, Question> questions_;
  uint64_t num_questions_ = 0;
  bool has_ended_ = false;
  std::vector<os::Waiter*> observers_;
};

}  // namespace cadre
