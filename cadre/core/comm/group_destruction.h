// Destroys a group whose last handle is dropped in a thread for which the group would have to wait:
// a thread that runs a callback or the deleter of a keep_alive. This includes such threads of other
// groups, because two callbacks may destroy each other's group.
//
// Threads: any. Blocking: never, if the thread is one of a group; else like ~Communicator.
// Errors: none; if no thread can be started, the group stays until the process ends, and the log
// says so.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "cadre/core/base/export.h"
#include "cadre/core/base/log.h"
#include "cadre/core/comm/communicator.h"

namespace cadre {

// Returns whether the calling thread runs code of the program from within a group. Returns false in
// a forked child, where the destruction of a group does nothing.
CADRE_EXPORT bool must_end_elsewhere(const Communicator& group);

// Calls `destroy` in a thread that is never joined. At its exit the process waits for a short time
// until that thread has ended.
CADRE_EXPORT void destroy_in_other_thread(std::function<void()> destroy,
                                          const std::shared_ptr<LogSink>& log) noexcept;

// Returns a handle to owner->communicator that shares the owner. The last handle destroys the
// owner, in another thread if must_end_elsewhere(). Owner: has a member `communicator`, a pointer
// to a group, and what that group borrows.
template <typename Owner>
std::shared_ptr<Communicator> share_group(std::unique_ptr<Owner> owner) {
  Communicator* const group = &*owner->communicator;
  const std::shared_ptr<Owner> shared(owner.release(), [](Owner* last) {
    std::unique_ptr<Owner> own(last);
    if (!must_end_elsewhere(*own->communicator)) return;
    const auto log = own->communicator->options().log;
    destroy_in_other_thread(
        [released = own.release()] { std::unique_ptr<Owner>{released}.reset(); }, log);
  });
  return std::shared_ptr<Communicator>(shared, group);
}

}  // namespace cadre
