#include "cadre/core/store/tcp/protocol.h"

#include "cadre/core/base/format.h"

namespace cadre::store {

std::string_view this_build() {
  return CADRE_VERSION;
}

Status check_same_build(const wire::StoreHello& server, const wire::StoreHello& client) {
  if (server.protocol == client.protocol && server.build == client.build) return {};
  return Error(ErrorCode::kInvalidArgument,
               format("the store server runs cadre {} (store protocol {}), this rank cadre {} "
                      "(store protocol {}); run one build on all ranks and on the launcher",
                      server.build, server.protocol, client.build, client.protocol));
}

}  // namespace cadre::store
