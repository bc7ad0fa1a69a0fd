#include "cadre/core/rendezvous/file_rendezvous.h"

#include "cadre/core/base/format.h"
#include "cadre/core/rendezvous/exchange_addresses.h"
#include "cadre/core/store/file/file_store.h"

namespace cadre {

Result<std::string> parse_file_url(std::string_view url) {
  constexpr std::string_view kScheme = "file://";
  const std::string_view path =
      url.starts_with(kScheme) ? url.substr(kScheme.size()) : std::string_view();
  if (path.size() > 1 && path.front() == '/') return std::string(path);
  return Error(ErrorCode::kInvalidArgument,
               format("rendezvous \"{}\" is not of the form file:///ABSOLUTE/PATH", url));
}

Result<Membership> FileRendezvous::join(Deadline deadline) {
  const int world_size = options_.world_size;
  CADRE_RETURN_IF_ERROR(check_place(options_.rank, world_size));
  Membership membership{.rank = options_.rank,
                        .world_size = world_size,
                        .round = options_.round,
                        .job_token = options_.job_token,
                        .job_size = world_size,
                        .listen_hosts = {options_.listen_host}};
  if (world_size == 1) return membership;
  auto store = FileStore::open(system_, {.path = options_.path, .num_ranks = world_size}, deadline);
  if (!store.ok()) {
    return store.error().with_context(format("rank {} of {}", options_.rank, world_size));
  }
  membership.store = std::move(store).value();
  const auto views = exchange_addresses(system_, *membership.store,
                                        {.rank = options_.rank,
                                         .world_size = world_size,
                                         .round = options_.round,
                                         .view = {},
                                         .warn_after = options_.warn_after,
                                         .log = options_.log},
                                        deadline);
  if (!views.ok()) return views.error();
  return membership;
}

}  // namespace cadre
