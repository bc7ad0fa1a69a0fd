// The handshake between a client and a store server: the names with which both ends prove that they
// have the token, and the check that both run the same build.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument naming both builds.
#pragma once

#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre::store {

inline constexpr std::string_view kClientProver = "cadre store client";
inline constexpr std::string_view kServerProver = "cadre store server";

// Returns the version of this library.
std::string_view this_build();

// Returns the hello, the first request that a client of this build sends.
wire::StoreRequest hello_of_client(const wire::Nonce& nonce);

struct Build {
  std::string_view name;
  int64_t protocol = wire::kStoreProtocol;
};

// Fails if the peer has another build or protocol. The error has the same text on both sides.
Status check_same_build(const Build& server, const Build& client);

// Returns the nonce in the hello of a client or server; kCorruption if its length is wrong.
Result<wire::Nonce> read_nonce(std::string_view text);

}  // namespace cadre::store
