// Fuzzes the parser of frames on data connections: it must return a frame or an error, and a parsed
// frame must encode to the same bytes.
#include <algorithm>
#include <cstdlib>

#include "cadre/core/wire/link_frame.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using cadre::wire::LinkFrame;
  cadre::ConstBytes input(reinterpret_cast<const std::byte*>(data), size);
  for (; input.size() >= LinkFrame::kBytes; input = input.subspan(LinkFrame::kBytes)) {
    const auto frame = LinkFrame::parse(input.first(LinkFrame::kBytes));
    if (frame.ok() && !std::ranges::equal(frame->encode(), input.first(LinkFrame::kBytes))) {
      std::abort();
    }
  }
  return 0;
}
