// The protocol of the store: that of c10d's TCPStore, as torch 2.11 to 2.13 have it, and Cadre's
// own verbs, by which a client proves the job's token (docs/formats/store-tcp.md).
//
// Threads: plain values. Blocking: never.
// Errors: kCorruption for bytes that no client sends, or beyond the limits below.
// Messages carry no length, so decoders take the bytes that have come and say whether the message
// is whole.
// Source: torch/csrc/distributed/c10d/TCPStoreBackend.hpp (verbs, magic) and observed traffic.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/wire/challenge.h"
#include "cadre/core/wire/store/store_request.h"

namespace cadre::wire {

inline constexpr int64_t kC10dMagic = 0x3C85F7CE;
// The version of Cadre's own verbs, which a hello contains.
inline constexpr int64_t kStoreProtocol = 4;

// The limits of a Store.
inline constexpr size_t kMaxKeyBytes = 4096;
inline constexpr size_t kMaxValueBytes = 16 << 20;
// The limits of the protocol. They are larger, because clients of c10d may have longer keys (8 KiB
// with libuv), and the keys of a Store get a prefix.
inline constexpr size_t kMaxSentKeyBytes = 8 << 10;
inline constexpr size_t kMaxKeysPerRequest = 1 << 16;
// Limits the size of a request, and of an answer.
inline constexpr size_t kMaxMessageBytes = 64 << 20;
inline constexpr size_t kMaxBuildBytes = 64;

// The answer to kWait and kBarrier, and to kCancel of a c10d client.
inline constexpr int64_t kC10dStopWaiting = 0;
inline constexpr int64_t kC10dWaitCanceled = 1;

// Checks that the request has as many keys and values as its verb takes.
Status check_shape(const StoreRequest& request);
// Returns whether the verb is about the connection on which it is sent. Such verbs are not passed
// to a Store.
bool is_of_connection(StoreVerb verb);

// Says how much of an incomplete message was read. Pass it to the next attempt, so that a long
// message that comes in pieces is not read from the start with each piece. A decoder resets it when
// the message is whole.
struct Progress {
  size_t num_needed = 0;   // the number of bytes that must have come before the next attempt
  size_t num_bytes = 0;    // the number of bytes that were read; they end with a whole text
  uint64_t num_texts = 0;  // the number of texts of a list that are in these bytes
};

// A message, if the first bytes of a stream held a whole one.
template <typename T>
struct Decoded {
  std::optional<T> message;  // nullopt if more bytes are needed
  size_t num_bytes = 0;  // the size of the message, or the least total size at which to try again
};

// REQUIRES: check_shape(request).ok().
CADRE_EXPORT std::vector<std::byte> encode(const StoreRequest& request);
CADRE_EXPORT Result<Decoded<StoreRequest>> decode_store_request(ConstBytes stream,
                                                                Progress& progress);

// Encodes the answer to a client of c10d, which cannot be an error. REQUIRES: the response has no
// error and the values that its verb promises.
CADRE_EXPORT std::vector<std::byte> encode_c10d_answer(StoreVerb verb,
                                                       const StoreResponse& response);
// Encodes the answer to a rank: the same bytes after a byte that says whether it is an error.
CADRE_EXPORT std::vector<std::byte> encode_answer(StoreVerb verb, const StoreResponse& response);

CADRE_EXPORT Result<Decoded<StoreResponse>> decode_c10d_answer(const StoreRequest& request,
                                                               ConstBytes stream,
                                                               Progress& progress);
CADRE_EXPORT Result<Decoded<StoreResponse>> decode_answer(const StoreRequest& request,
                                                          ConstBytes stream, Progress& progress);

}  // namespace cadre::wire
