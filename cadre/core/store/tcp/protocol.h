// What both ends of the native store protocol must agree on beyond the format: the names of the two
// provers of the token, and that both run the same build.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument naming both builds.
#pragma once

#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre::store {

inline constexpr std::string_view kClientProver = "cadre store client";
inline constexpr std::string_view kServerProver = "cadre store server";

// The build of this library; its version.
std::string_view this_build();

// Refuses a peer of another build or protocol; the same sentence on both sides.
Status check_same_build(const wire::StoreHello& server, const wire::StoreHello& client);

}  // namespace cadre::store
