// Checks that parse_preemption_file() returns for all inputs, and that what it accepts is encoded
// to a file that is read with the same values.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cadre/core/wire/preemption_file.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  const std::string_view text(reinterpret_cast<const char*>(data), num_bytes);
  if (const auto file = cadre::parse_preemption_file(text)) {
    if (cadre::parse_preemption_file(cadre::encode_preemption_file(*file)) != file) std::abort();
  }
  return 0;
}

// One call in 16 replaces the input by a valid file; the others mutate it.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  constexpr std::string_view kValid = "cadre-preemption 1\nsaved-step 42\nexit-code 75\n";
  if (seed % 16 == 0 && kValid.size() <= max_size) {
    kValid.copy(reinterpret_cast<char*>(data), kValid.size());
    return kValid.size();
  }
  return LLVMFuzzerMutate(data, size, max_size);
}
