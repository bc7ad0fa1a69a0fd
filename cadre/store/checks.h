// The argument checks and the timeout error that every Store shares, so that all of them refuse the
// same calls with the same sentences.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument, kTimeout.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "cadre/base/error.h"

namespace cadre {

Status check_store_key(std::string_view key);
Status check_store_keys(std::span<const std::string> keys);
Status check_store_entry(std::string_view key, std::string_view value);
Status check_store_entries(std::span<const std::string> keys, std::span<const std::string> values);

Status check_store_barrier(std::string_view key, int64_t num_arrivals);

// kTimeout of `verb` ("get"), naming the first of the keys that were waited for.
Error store_timeout(std::string_view verb, std::span<const std::string> keys);

}  // namespace cadre
