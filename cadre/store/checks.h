// The argument checks and the timeout error of all stores.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument, kTimeout.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "cadre/base/error.h"
#include "cadre/wire/store_message.h"

namespace cadre {

// The limits of store.h.
Status check_store_request(const wire::StoreRequest& request);
Status check_store_entry(std::string_view key, std::string_view value);

// kTimeout of `verb` ("get"), naming the first of the keys that were waited for.
Error store_timeout(std::string_view verb, std::span<const std::string> keys);

}  // namespace cadre
