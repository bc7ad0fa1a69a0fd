// The argument checks and the timeout error of all stores.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument, kTimeout.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/os/host/fork_mark.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre {

// These functions return an error if a key or value exceeds the limits that store.h states.
Status check_store_request(const wire::StoreRequest& request);
Status check_store_entry(std::string_view key, std::string_view value);

// Returns an error if this process is a forked child of the process that opened the store, because
// such a child shares the store's connections or locks.
Status check_not_forked(const os::ForkMark& mark, wire::StoreVerb verb);

// Returns the kTimeout error of a request that waited for the keys in `missing`. If it is not known
// which keys of the request are set, `missing` has all of them. If the request waits for no key,
// the error says that the store did not answer.
Error store_timeout(const wire::StoreRequest& request, std::span<const std::string> missing);

}  // namespace cadre
