#include "cadre/core/collective/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

// ThreadSanitizer does not see streaming stores, so builds with it use a plain copy.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#include <emmintrin.h>
#define CADRE_STREAMING_STORES 1
#else
#define CADRE_STREAMING_STORES 0
#endif

namespace cadre {
namespace {

#if CADRE_STREAMING_STORES
constexpr size_t kLine = 64;

// Copies with SSE2, which every x86-64 CPU has. Four 16-byte streaming stores fill one line of the
// write-combining buffer, so wider registers would not help.
void copy_streaming(std::byte* out, const std::byte* in, size_t num_bytes) {
  const size_t misaligned = reinterpret_cast<uintptr_t>(out) % kLine;
  const size_t head = misaligned == 0 ? 0 : std::min(num_bytes, kLine - misaligned);
  std::memcpy(out, in, head);
  size_t done = head;
  for (; done + kLine <= num_bytes; done += kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(in + done);
    auto* to = reinterpret_cast<__m128i*>(out + done);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(out + done, in + done, num_bytes - done);
  // Streaming stores are weakly ordered: without the fence a flag that is stored after the copy
  // could become visible before the copied data.
  _mm_sfence();
}
#endif

}  // namespace

void copy(std::byte* out, const std::byte* in, size_t num_bytes, StorePolicy stores) {
  if (num_bytes == 0) return;
#if CADRE_STREAMING_STORES
  if (stores == StorePolicy::kStreaming) {
    copy_streaming(out, in, num_bytes);
    return;
  }
#else
  static_cast<void>(stores);
#endif
  std::memcpy(out, in, num_bytes);
}

}  // namespace cadre
