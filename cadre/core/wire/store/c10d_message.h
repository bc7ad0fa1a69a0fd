// The protocol of PyTorch's TCPStore, as torch 2.11 to 2.13 speak it: requests and answers
// (docs/formats/store-c10d.md).
//
// Threads: plain values. Blocking: never.
// Errors: kCorruption for bytes that no client of c10d sends, or beyond the limits below.
// Messages carry no length, so decoders take the bytes that have come and say whether they suffice.
// Source: torch/csrc/distributed/c10d/TCPStoreBackend.hpp (verbs, magic) and observed traffic.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::wire {

inline constexpr uint32_t kC10dMagic = 0x3C85F7CE;
// c10d itself allows keys of 8 KiB and values of 8 MiB with libuv.
inline constexpr size_t kMaxC10dKeyBytes = 8 << 10;
inline constexpr size_t kMaxC10dValueBytes = 16 << 20;
inline constexpr size_t kMaxC10dKeysPerRequest = 1 << 16;
inline constexpr size_t kMaxC10dRequestBytes = 64 << 20;

enum class C10dVerb : uint8_t {
  kValidate,
  kSet,
  kCompareSet,
  kGet,
  kAdd,
  kCheck,
  kWait,
  kNumKeys,
  kDeleteKey,
  kAppend,
  kMultiGet,
  kMultiSet,
  kCancelWait,
  kPing,
  kQueuePush,
  kQueuePop,
  kQueueLength,
  kListKeys,
  kBarrier,
};
inline constexpr int kNumC10dVerbs = 19;

CADRE_EXPORT std::string_view to_string(C10dVerb verb);

struct C10dRequest {
  C10dVerb verb = C10dVerb::kPing;
  int64_t number = 0;  // validate: the magic; ping: the nonce; add: the amount; barrier: world size
  std::vector<std::string> keys;
  std::vector<std::string> values;  // compare_set: expected, desired

  friend bool operator==(const C10dRequest&, const C10dRequest&) = default;
};

// What the first bytes of a stream held.
template <typename T>
struct Decoded {
  std::optional<T> message;  // none: more bytes are needed
  size_t num_bytes = 0;      // size of the message, or the least total size worth another try
};

CADRE_EXPORT std::vector<std::byte> encode(const C10dRequest& request);
CADRE_EXPORT Result<Decoded<C10dRequest>> decode_c10d_request(ConstBytes stream);

// Answers. check: kC10dReady or kC10dNotReady; wait and barrier: kC10dStopWaiting, or
// kC10dWaitCanceled after a cancel_wait.
inline constexpr uint8_t kC10dReady = 0;
inline constexpr uint8_t kC10dNotReady = 1;
inline constexpr uint8_t kC10dStopWaiting = 0;
inline constexpr uint8_t kC10dWaitCanceled = 1;

CADRE_EXPORT std::vector<std::byte> encode_c10d_byte(uint8_t value);
CADRE_EXPORT std::vector<std::byte> encode_c10d_nonce(uint32_t nonce);
CADRE_EXPORT std::vector<std::byte> encode_c10d_number(int64_t number);
CADRE_EXPORT std::vector<std::byte> encode_c10d_value(std::string_view value);

CADRE_EXPORT Result<Decoded<uint8_t>> decode_c10d_byte(ConstBytes stream);
CADRE_EXPORT Result<Decoded<uint32_t>> decode_c10d_nonce(ConstBytes stream);
CADRE_EXPORT Result<Decoded<int64_t>> decode_c10d_number(ConstBytes stream);
CADRE_EXPORT Result<Decoded<std::vector<std::string>>> decode_c10d_values(ConstBytes stream,
                                                                          size_t count);

}  // namespace cadre::wire
