#include "cadre/parallel/shard/data_strategy.h"

namespace cadre {

std::string_view to_string(DataStrategy strategy) {
  constexpr std::array<std::string_view, kDataStrategies.size()> kNames{"single", "ddp",  "zero1",
                                                                        "zero2",  "fsdp", "hsdp"};
  return kNames[static_cast<size_t>(strategy)];
}

std::optional<DataStrategy> parse_data_strategy(std::string_view text) {
  for (const DataStrategy strategy : kDataStrategies) {
    if (to_string(strategy) == text) return strategy;
  }
  return std::nullopt;
}

bool has_units(DataStrategy strategy) {
  return strategy == DataStrategy::kFsdp || strategy == DataStrategy::kHsdp;
}

}  // namespace cadre
