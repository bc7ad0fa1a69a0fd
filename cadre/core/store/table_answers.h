// Answers the requests of a store from a KeyTable. Every store that has a KeyTable uses this code.
//
// Threads: one at a time; the owner of the table locks. Blocking: never; a request that waits is
// answered only after its owner has found the keys or the item. Errors: they are in the response.
#pragma once

#include <cstdint>
#include <limits>

#include "cadre/core/store/key_table.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre::store {

// Answers any request except barriers and those that act on a connection. REQUIRES: the keys of
// get, wait and multi_get are set, and the queue of queue_pop is not empty. If the values have more
// than `max_bytes`, returns an error without copying them.
wire::StoreResponse answer_from(KeyTable& table, const wire::StoreRequest& request,
                                size_t max_bytes = std::numeric_limits<size_t>::max());

// Returns the kTimeout error of a request that waits. The error names the missing keys, the empty
// queue, or the number of arrivals at the barrier.
Error timeout_from(const KeyTable& table, const wire::StoreRequest& request);

}  // namespace cadre::store
