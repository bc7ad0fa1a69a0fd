// Says whether the bytes of a send are in memory yet. A device may still be copying them to the
// host when a program issues the send. The bytes are read when the gate is open. Later sends of the
// same message space and tag to the same rank wait behind this one; other messages do not.
//
// Threads: the holder of the progress role calls it, from whichever thread that is. Blocking:
// never. Lifetime: the message keeps it until it has ended. Errors: an exception becomes the
// failure of the group.
#pragma once

#include <functional>

namespace cadre {

// A null gate is open.
using SendGate = std::function<bool()>;

}  // namespace cadre
