#include "planted_bugs.h"

#include "cadre/sim/simulated_socket.h"

namespace cadre::testing {

Result<std::unique_ptr<os::SharedMemory>> BuggySystem::create_segment(size_t num_bytes) {
  auto created = inner_.create_segment(num_bytes);
  if (!created.ok() || bug_ != PlantedBug::kDoubleFreeOfASlot) return created;
  const auto& memory = dynamic_cast<sim::SimulatedSegment&>(**created).memory();
  if (last_segment_ != nullptr && last_segment_->bytes().size() == memory->bytes().size()) {
    return std::unique_ptr<os::SharedMemory>(
        std::make_unique<sim::SimulatedSegment>(last_segment_));
  }
  last_segment_ = memory;
  return created;
}

// "cadre/7/..." becomes "cadre/1/...".
std::string BuggyStore::rename(std::string_view key) const {
  constexpr std::string_view kPrefix = "cadre/";
  if (bug_ != PlantedBug::kStaleRound || !key.starts_with(kPrefix)) return std::string(key);
  const size_t end = key.find('/', kPrefix.size());
  if (end == std::string_view::npos) return std::string(key);
  return std::string(kPrefix) + "1" + std::string(key.substr(end));
}

std::vector<std::string> BuggyStore::rename(std::span<const std::string> keys) const {
  std::vector<std::string> renamed;
  for (const std::string& key : keys) renamed.push_back(rename(key));
  return renamed;
}

}  // namespace cadre::testing
