// Fuzzes the text of a tuning file. Every file that is accepted must have sizes in the documented
// bounds, and must be the same after it was written and read again.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cadre/core/collective/net/tuning_file.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  const std::string_view text(reinterpret_cast<const char*>(data), num_bytes);
  const auto file = cadre::parse_tuning_file(text);
  if (!file.ok()) return 0;
  const cadre::CrossoverTable& table = file->table;
  for (const uint64_t size : {table.all_reduce_ring_bytes, table.broadcast_chain_bytes,
                              table.all_gather_ring_bytes, table.gather_linear_bytes}) {
    if (size < 1 || size > cadre::kMaxCrossoverBytes) std::abort();
  }
  if (table.chain_segment_bytes < 4096) std::abort();
  const auto again = cadre::parse_tuning_file(cadre::to_text(*file));
  if (!again.ok() || *again != *file) std::abort();
  return 0;
}

// One call in 16 replaces the input by a valid file; the others mutate it.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  if (seed % 16 != 0) return LLVMFuzzerMutate(data, size, max_size);
  const std::string valid = cadre::to_text(
      {.table = {}, .measured = cadre::TuningOrigin{"net", "1x2", "2026-11-28", "0.1.0"}});
  if (valid.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  valid.copy(reinterpret_cast<char*>(data), valid.size());
  return valid.size();
}
