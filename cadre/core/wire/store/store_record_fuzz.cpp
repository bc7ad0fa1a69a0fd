// Fuzzes the records of a FileStore. Every record that is accepted must encode to the same bytes. A
// record that was truncated anywhere must be recognised as incomplete, and never be read as another
// record.
#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/store/store_record.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cadre::wire;  // tidy: allow, one function of a fuzz target
  const cadre::ConstBytes input(reinterpret_cast<const std::byte*>(data), size);
  // First, the input is decoded as the content of a file.
  for (cadre::ConstBytes rest = input; !rest.empty();) {
    const auto decoded = decode_store_record(rest);
    if (!decoded.ok() || !decoded->record) break;
    const auto again = encode(*decoded->record);
    require(as_text(again) == as_text(rest.first(decoded->num_bytes)));
    rest = rest.subspan(decoded->num_bytes);
  }
  if (size < 3) return 0;
  // Second, the input becomes the fields of a record, because random bytes never have the right
  // checksum.
  const size_t key_bytes = std::min<size_t>(data[1], size - 3);
  const std::string_view text = as_text(input.subspan(3));
  const StoreRecord record{static_cast<StoreRecordVerb>(data[0] % kNumStoreRecordVerbs),
                           std::string(text.substr(0, key_bytes)),
                           std::string(text.substr(key_bytes))};
  const auto bytes = encode(record);
  const auto whole = decode_store_record(bytes);
  require(whole.ok() && whole->record == record && whole->num_bytes == bytes.size());
  const size_t cut = data[2] * bytes.size() / 256;
  const auto torn = decode_store_record(cadre::ConstBytes(bytes).first(cut));
  require(torn.ok() && !torn->record);
  return 0;
}
