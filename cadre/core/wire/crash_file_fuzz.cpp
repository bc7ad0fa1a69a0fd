// Checks that parse_crash_file(), find_mapped_code() and parse_error_file() return for all inputs.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cadre/core/wire/crash_file.h"
#include "cadre/core/wire/error_file.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  const std::string_view text(reinterpret_cast<const char*>(data), num_bytes);
  if (const auto file = cadre::parse_crash_file(text); file.ok()) {
    if (file->frames.size() > cadre::kMaxCrashFrames + 1) std::abort();
    for (const cadre::CrashFrame& frame : file->frames) {
      const auto code = cadre::find_mapped_code(file->maps, frame.address);
      if (code && code->path.empty()) std::abort();
    }
  }
  if (const auto error = cadre::parse_error_file(text)) {
    // A text that is not UTF-8 cannot be in a JSON file, so what was parsed is encoded unchanged.
    if (cadre::parse_error_file(cadre::encode_error_file(*error)) != error) std::abort();
  }
  return 0;
}

// One call in 16 replaces the input by a valid file; the others mutate it.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  constexpr std::string_view kCrash =
      "cadre-crash 1\nsignal 11\ncode 1\naddress 0x10\nprocess 7\nthread 8\ntime-ms 9\nmaps\n"
      "1000-2000 r-xp 00000000 08:01 5   /bin/x\nframes\nexact 0x1010\ncall 0x1020\nend\n";
  constexpr std::string_view kError =
      R"({"message":{"message":"x","extraInfo":{"py_callstack":"y","timestamp":"5","cadre":{"rank":1}}}})";
  const std::string_view valid = seed % 2 == 0 ? kCrash : kError;
  if (seed % 16 < 2 && valid.size() <= max_size) {
    valid.copy(reinterpret_cast<char*>(data), valid.size());
    return valid.size();
  }
  return LLVMFuzzerMutate(data, size, max_size);
}
