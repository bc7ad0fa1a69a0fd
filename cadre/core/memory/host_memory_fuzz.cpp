// Fuzzes resolve() with places from peers: it must return memory inside the slice of the slot, or
// null.
#include <cstdlib>
#include <cstring>

#include "cadre/core/memory/host_memory.h"
#include "cadre/core/os/system.h"

namespace cadre {
namespace {

constexpr HostMemoryLayout kLayout{.num_slots = 3, .front_bytes = 64, .slice_bytes = 16 << 12};

struct Input {
  SlotPlace at;
  uint64_t num_bytes = 0;
};

void resolve(const HostMemory& memory, const Input& input) {
  const std::byte* const bytes = memory.resolve(input.at, input.num_bytes);
  const auto places = std::span(&input.at, 1);
  const auto view = memory.map_side_by_side(places, input.num_bytes);
  if (bytes == nullptr) {
    if (view.ok()) std::abort();
    return;
  }
  const std::byte* const slice =
      memory.front().data() + HostMemory::segment_bytes(kLayout) -
      static_cast<size_t>(kLayout.num_slots - input.at.slot) * kLayout.slice_bytes;
  if (bytes < slice || input.num_bytes > kLayout.slice_bytes ||
      bytes + input.num_bytes > slice + kLayout.slice_bytes) {
    std::abort();
  }
}

}  // namespace
}  // namespace cadre

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto system = cadre::os::make_native_system();
  static const auto memory =
      cadre::HostMemory::attach(
          system->create_segment(cadre::HostMemory::segment_bytes(cadre::kLayout)).value_or_throw(),
          cadre::kLayout, 0)
          .value_or_throw();
  cadre::Input input;
  if (size < sizeof(input)) return 0;
  std::memcpy(&input, data, sizeof(input));
  cadre::resolve(*memory, input);
  return 0;
}
