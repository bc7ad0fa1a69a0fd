// Fuzzes the parsers of control messages and of rank addresses: they must return a value or an
// error, and a decoded value must encode to the same bytes.
#include <algorithm>
#include <cstdlib>

#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/control.h"

namespace cadre {
namespace {

// Encodes the events into new frames and checks that they decode to the same events.
void check_frames(const wire::EventBatch& batch) {
  wire::ControlSplitter splitter;
  splitter.append(wire::encode_events(batch.events));
  std::vector<wire::Event> events;
  while (true) {
    const auto next = splitter.next();
    if (!next.ok()) std::abort();
    if (!next.value()) break;
    const auto& part = std::get<wire::EventBatch>(*next.value());
    events.insert(events.end(), part.events.begin(), part.events.end());
  }
  if (events != batch.events) std::abort();
}

void decode(ConstBytes input) {
  if (const auto rank_address = wire::decode_rank_address(wire::as_text(input));
      rank_address.ok()) {
    if (wire::encode_rank_address(*rank_address) != wire::as_text(input)) std::abort();
  }
  wire::ControlSplitter splitter;
  size_t consumed = 0;
  for (size_t at = 0; at < input.size(); at += 7) {
    splitter.append(input.subspan(at, std::min<size_t>(7, input.size() - at)));
    while (true) {
      const auto next = splitter.next();
      if (!next.ok()) return;
      if (!next.value()) break;
      const auto frame = wire::encode_control(*next.value());
      if (consumed + frame.size() > input.size() ||
          wire::as_text(frame) != wire::as_text(input.subspan(consumed, frame.size()))) {
        std::abort();
      }
      consumed += frame.size();
      if (const auto* batch = std::get_if<wire::EventBatch>(&*next.value())) check_frames(*batch);
    }
  }
}

}  // namespace
}  // namespace cadre

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  cadre::decode({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
