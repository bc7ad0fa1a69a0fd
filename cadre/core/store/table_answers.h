// Answers the requests of a store from a KeyTable. Every store that has a KeyTable uses it.
//
// Threads: one at a time; the owner of the table locks. Blocking: never; the owner answers a
// request that waits once what it waits for is there. Errors: the response contains them.
#pragma once

#include <cstdint>
#include <limits>

#include "cadre/core/store/key_table.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre::store {

// Answers any request except barriers and those about a connection. REQUIRES: the keys of get, wait
// and multi_get are there, and the queue of queue_pop is not empty. For an answer of more than
// `max_bytes`, the response is an error, and the answer is not built.
wire::StoreResponse answer_from(KeyTable& table, const wire::StoreRequest& request,
                                size_t max_bytes = std::numeric_limits<size_t>::max());

// Returns the timeout of a request that waits. The error names what the table lacks: the missing
// keys, the empty queue, or the number of arrivals.
Error timeout_from(const KeyTable& table, const wire::StoreRequest& request);

}  // namespace cadre::store
