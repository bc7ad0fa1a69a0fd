// Fuzzes the list of lost ranks. Any bytes in the store can be read, and the list that was read
// stays the same when it is written and read again.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "cadre/core/rendezvous/lost_rank.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto lost =
      cadre::read_lost_ranks(std::string_view(reinterpret_cast<const char*>(data), size));
  std::string again;
  for (const cadre::LostRank& rank : lost) again += cadre::write_lost_rank(rank);
  if (cadre::read_lost_ranks(again) != lost) std::abort();
  return 0;
}
