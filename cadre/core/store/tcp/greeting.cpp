#include "cadre/core/store/tcp/greeting.h"

#include <cstring>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::store {

std::string_view this_build() {
  return CADRE_VERSION;
}

wire::StoreRequest hello_of_client(const wire::Nonce& nonce) {
  return {.verb = wire::StoreVerb::kHello,
          .amount = wire::kStoreProtocol,
          .keys = {std::string(this_build())},
          .values = {std::string(wire::as_text(nonce))}};
}

Status check_same_build(const Build& server, const Build& client) {
  if (server.protocol == client.protocol && server.name == client.name) return {};
  return Error(
      ErrorCode::kInvalidArgument,
      format("the store server runs cadre {} (store protocol {}), this rank cadre {} "
             "(store protocol {}); run one build on all ranks and on the launcher",
             printable(server.name), server.protocol, printable(client.name), client.protocol));
}

Result<wire::Nonce> read_nonce(std::string_view text) {
  wire::Nonce nonce;
  if (text.size() == nonce.size()) {
    std::memcpy(nonce.data(), text.data(), nonce.size());
    return nonce;
  }
  return Error(ErrorCode::kCorruption, format("a store hello has a nonce of {} bytes, expected {}",
                                              text.size(), nonce.size()));
}

}  // namespace cadre::store
