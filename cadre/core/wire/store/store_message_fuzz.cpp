// Fuzzes the native store protocol: framing, handshake, requests and responses. Whatever a decoder
// accepts must encode to the same bytes, and whatever it takes must not depend on how the stream
// was cut.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/framing.h"
#include "cadre/core/wire/store/store_message.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace cadre::wire {
namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

// A hello of a later protocol may carry more than is read of it; all else is read to the last byte.
template <typename Message>
void expect_same_bytes(const Result<Message>& message, ConstBytes payload) {
  if (!message.ok()) {
    require(message.error().code() == ErrorCode::kCorruption);
    return;
  }
  const std::vector<std::byte> again = encode(*message);
  require(as_text(again) == as_text(payload.first(std::min(again.size(), payload.size()))));
}

void decode_payload(ConstBytes payload) {
  expect_same_bytes(decode_store_hello(payload), payload);
  expect_same_bytes(decode_store_proof(payload), payload);
  expect_same_bytes(decode_store_request(payload), payload);
  expect_same_bytes(decode_store_response(payload), payload);
}

// The frames of a stream that comes in pieces of `step` bytes; decodes them along the way.
std::vector<size_t> read_frames(ConstBytes stream, size_t step) {
  StreamBuffer buffer;
  std::vector<size_t> sizes;
  for (size_t at = 0; at < stream.size(); at += step) {
    buffer.append(stream.subspan(at, std::min(step, stream.size() - at)));
    while (true) {
      const auto frame = peek_frame(buffer, kMaxStoreFrameBytes);
      if (!frame.ok()) return sizes;
      if (!frame->has_value()) break;
      decode_payload(**frame);
      sizes.push_back((*frame)->size());
      buffer.consume(kFrameHeaderBytes + (*frame)->size());
    }
  }
  return sizes;
}

// One well-formed frame of each kind: random bytes alone rarely get past the counts and lengths.
std::vector<std::byte> sample(unsigned seed) {
  const std::vector<std::vector<std::byte>> payloads = {
      encode(StoreHello{.build = "0.1.0"}),
      encode(StoreProof{}),
      encode(StoreRequest{.id = 1, .verb = StoreVerb::kSet, .keys = {"k"}, .values = {"v"}}),
      encode(StoreRequest{.id = 2, .verb = StoreVerb::kAdd, .amount = -1, .keys = {"n"}}),
      encode(StoreRequest{
          .id = 3, .verb = StoreVerb::kMultiSet, .keys = {"a", "b"}, .values = {"1", "2"}}),
      encode(StoreRequest{.id = 4, .verb = StoreVerb::kWait, .keys = {"a", "b", "c"}}),
      encode(StoreResponse{.id = 5, .number = 7, .values = {"a", ""}}),
      encode(StoreResponse{.id = 6, .error = Error(ErrorCode::kTimeout, "late")}),
  };
  StreamBuffer out;
  append_frame(out, payloads[seed % payloads.size()]);
  return {out.view().begin(), out.view().end()};
}

}  // namespace
}  // namespace cadre::wire

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const cadre::ConstBytes input(reinterpret_cast<const std::byte*>(data), size);
  cadre::wire::decode_payload(input);
  const std::vector<size_t> whole = cadre::wire::read_frames(input, std::max<size_t>(size, 1));
  cadre::wire::require(whole == cadre::wire::read_frames(input, 5));
  return 0;
}

// Now and then replaces the input by a good frame; else mutates it, and keeps the frame's length
// right half of the time, so that what stands inside is reached.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  using cadre::wire::kFrameHeaderBytes;
  if (seed % 32 == 0 || size < kFrameHeaderBytes) {
    const std::vector<std::byte> fresh = cadre::wire::sample(seed / 32);
    if (fresh.size() > max_size) return size;
    std::memcpy(data, fresh.data(), fresh.size());
    return fresh.size();
  }
  size = LLVMFuzzerMutate(data, size, max_size);
  if (seed % 2 == 0 && size >= kFrameHeaderBytes) {
    cadre::wire::ByteWriter length;
    length.integer(static_cast<uint32_t>(size - kFrameHeaderBytes));
    std::memcpy(data, length.bytes().data(), kFrameHeaderBytes);
  }
  return size;
}
