// Whatever the text, the parser returns; what it accepts is written and read again as the same
// schedule.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cadre/pipeline/schedule_csv.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  const auto schedule = cadre::parse_pipeline_csv({reinterpret_cast<const char*>(data), num_bytes});
  if (!schedule.ok()) return 0;
  const auto again = cadre::parse_pipeline_csv(cadre::to_csv(*schedule));
  if (!again.ok() || *again != *schedule) std::abort();
  return 0;
}
