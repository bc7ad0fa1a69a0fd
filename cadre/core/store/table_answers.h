// Answers the requests of a store from a KeyTable: shared by every store that has one.
//
// Threads: one at a time; the owner of the table locks. Blocking: never; requests that wait are
// answered once what they wait for is there. Errors: in the response.
#pragma once

#include <cstdint>
#include <limits>

#include "cadre/core/store/key_table.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre::store {

// Answers any request but a barrier and those of a connection. REQUIRES: the keys of get, wait and
// multi_get are there, and queue_pop's queue is not empty. An answer of more than `max_bytes` is
// refused before it is built.
wire::StoreResponse answer_from(KeyTable& table, const wire::StoreRequest& request,
                                size_t max_bytes = std::numeric_limits<size_t>::max());

// The timeout of a request that waits, naming what the table lacks: the missing keys, the empty
// queue, or the number of arrivals.
Error timeout_from(const KeyTable& table, const wire::StoreRequest& request);

}  // namespace cadre::store
