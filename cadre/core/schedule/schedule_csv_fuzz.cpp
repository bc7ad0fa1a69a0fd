// Checks that the parser and the checker return for every text. A schedule that the parser accepts
// must be the same after writing and reading, and one that the checker accepts must be one that can
// be lowered and simulated.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "cadre/core/schedule/check.h"
#include "cadre/core/schedule/generate.h"
#include "cadre/core/schedule/lowering.h"
#include "cadre/core/schedule/schedule_csv.h"
#include "cadre/core/schedule/simulate.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

bool is_compute_only(const cadre::PipelineSchedule& schedule) {
  return std::ranges::all_of(schedule.ranks, [](const auto& actions) {
    return std::ranges::all_of(actions, [](const cadre::PipelineAction& action) {
      return cadre::is_computation(action.kind) ||
             action.kind == cadre::PipelineActionKind::kOverlap;
    });
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  const auto schedule = cadre::parse_pipeline_csv({reinterpret_cast<const char*>(data), num_bytes});
  if (!schedule.ok()) return 0;
  const auto again = cadre::parse_pipeline_csv(cadre::to_csv(*schedule));
  if (!again.ok() || *again != *schedule) std::abort();
  if (!cadre::check_pipeline(*schedule).ok()) return 0;
  if (!cadre::simulate_pipeline(*schedule, {}).ok()) std::abort();
  if (!is_compute_only(*schedule)) return 0;
  const auto lowered = cadre::lower_pipeline(*schedule, {.max_unsharded_stages = 2});
  if (!lowered.ok() || !cadre::check_pipeline(*lowered).ok()) std::abort();
  return 0;
}

// Mutates the text, and now and then starts again from a valid schedule with every kind of action.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  if (seed % 16 == 0) {
    auto fresh = cadre::make_pipeline_schedule(
        {.kind = cadre::PipelineScheduleKind::kDualPipeV, .num_ranks = 2, .num_microbatches = 4});
    if (seed % 32 == 0) fresh = cadre::lower_pipeline(*fresh, {.max_unsharded_stages = 1});
    const std::string text = cadre::to_csv(*fresh);
    if (text.size() > max_size) return size;
    std::memcpy(data, text.data(), text.size());
    size = text.size();
  }
  return LLVMFuzzerMutate(data, size, max_size);
}
