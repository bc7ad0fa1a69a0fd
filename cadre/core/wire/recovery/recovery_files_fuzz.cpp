// Checks that the parsers of the recovery files return for all inputs, and that what they accept is
// encoded to a file that is read with the same values.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "cadre/core/wire/recovery/recovery_files.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  const std::string_view text(reinterpret_cast<const char*>(data), num_bytes);
  if (const auto file = cadre::parse_recovery_file(text)) {
    if (cadre::parse_recovery_file(cadre::encode_recovery_file(*file)) != file) std::abort();
  }
  if (const auto file = cadre::parse_membership_file(text)) {
    if (cadre::parse_membership_file(cadre::encode_membership_file(*file)) != file) std::abort();
  }
  if (const auto file = cadre::parse_lost_ranks_file(text)) {
    if (cadre::parse_lost_ranks_file(cadre::encode_lost_ranks_file(*file)) != file) std::abort();
  }
  return 0;
}

// Three calls in 16 replace the input by a valid file; the others mutate it.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  std::string valid;
  if (seed % 16 == 0) {
    valid = cadre::encode_recovery_file({.is_waiting = true, .num_memberships = 3});
  } else if (seed % 16 == 1) {
    cadre::MembershipFile file{.number = 7, .variables = {}};
    for (const auto name : cadre::kMembershipVariables) file.variables.emplace_back(name, "1");
    valid = cadre::encode_membership_file(file);
  } else if (seed % 16 == 2) {
    valid = cadre::encode_lost_ranks_file({.num_memberships = 1, .ranks = {{0, 3}, {8, 11}}});
  }
  if (!valid.empty() && valid.size() <= max_size) {
    valid.copy(reinterpret_cast<char*>(data), valid.size());
    return valid.size();
  }
  return LLVMFuzzerMutate(data, size, max_size);
}
