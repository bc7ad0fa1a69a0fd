// Fuzzes the table of hosts. Every table that is accepted must encode to the same bytes, and no two
// of its hosts may have the same ranks.
#include <cstdint>
#include <cstdlib>
#include <set>

#include "cadre/core/wire/byte_codec.h"
#include "cadre/launch/agent/table.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using cadre::launch::Host;
  const cadre::ConstBytes input(reinterpret_cast<const std::byte*>(data), size);
  const auto table = cadre::launch::decode_table(input);
  if (!table.ok()) return 0;
  if (cadre::wire::as_text(encode(*table)) != cadre::wire::as_text(input)) std::abort();
  std::set<uint64_t> first_ranks;
  for (const Host& host : table->hosts) {
    const auto ranks = ranks_of(*table, host.id);
    if (ranks && !first_ranks.insert(ranks->first_rank).second) std::abort();
  }
  return 0;
}
