// What both ends of a connection to a store server agree on before a client is served: the names of
// the two provers of the token, and that both run the same build.
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

// The request by which a client of this build begins.
wire::StoreRequest hello_of_client(const wire::Nonce& nonce);

struct Build {
  std::string_view name;
  int64_t protocol = wire::kStoreProtocol;
};

// Refuses a peer of another build or protocol; the same sentence on both sides.
Status check_same_build(const Build& server, const Build& client);

// The nonce in a hello; kCorruption for another length.
Result<wire::Nonce> read_nonce(std::string_view text);

}  // namespace cadre::store
