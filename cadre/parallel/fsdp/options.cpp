#include "cadre/parallel/fsdp/options.h"

#include <array>

namespace cadre {
namespace {

constexpr std::array<std::string_view, 4> kReshardNames{"after_forward", "after_backward",
                                                        "after_reduction", "onto_group"};

}  // namespace

std::string_view to_string(Reshard reshard) {
  return kReshardNames[static_cast<size_t>(reshard)];
}

std::optional<Reshard> parse_reshard(std::string_view text) {
  for (size_t i = 0; i < kReshardNames.size(); ++i) {
    if (kReshardNames[i] == text) return static_cast<Reshard>(i);
  }
  return std::nullopt;
}

}  // namespace cadre
