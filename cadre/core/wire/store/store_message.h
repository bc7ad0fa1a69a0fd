// The protocol of the store: that of c10d's TCPStore in torch 2.11 to 2.13, and verbs (commands) of
// Cadre, with which a client proves that it has the job's token (docs/formats/store-tcp.md).
//
// Threads: plain values. Blocking: never.
// Errors: kCorruption for invalid messages and for ones over the limits below.
// Messages have no length prefix, so a decoder gets the bytes that have arrived and says whether
// they are a complete message.
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
// The version of Cadre's own verbs, which both ends send in their hello.
inline constexpr int64_t kStoreProtocol = 4;

// The limits of keys and values in calls of a Store.
inline constexpr size_t kMaxKeyBytes = 4096;
inline constexpr size_t kMaxValueBytes = 16 << 20;
// The limits of messages. The limit of a key is larger than in a Store, because c10d clients may
// have longer keys (8 KiB with libuv) and add a prefix.
inline constexpr size_t kMaxSentKeyBytes = 8 << 10;
inline constexpr size_t kMaxKeysPerRequest = 1 << 16;
// The largest size of a request or of an answer.
inline constexpr size_t kMaxMessageBytes = 64 << 20;
inline constexpr size_t kMaxBuildBytes = 64;

// The bytes that answer a c10d client: kC10dStopWaiting answers kWait and kBarrier,
// kC10dWaitCanceled answers kCancel.
inline constexpr int64_t kC10dStopWaiting = 0;
inline constexpr int64_t kC10dWaitCanceled = 1;

// Checks that the request has as many keys and values as its verb takes.
Status check_shape(const StoreRequest& request);
// Returns whether the verb acts on the connection over which it is sent, such as a handshake. Such
// verbs are never passed to a Store.
bool is_of_connection(StoreVerb verb);

// Records how much of an incomplete message was decoded. The caller passes it to the next call of
// the decoder, so that a long message that arrives in pieces is not decoded from the start each
// time. A decoder resets it when the message is complete.
struct Progress {
  size_t num_needed = 0;   // the next call needs at least so many bytes of the message
  size_t num_bytes = 0;    // the number of decoded bytes, which end with a complete text
  uint64_t num_texts = 0;  // the number of texts of a list in these bytes
};

// The result of a decoder: the first message of a stream, if it is complete.
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
// error, and has the number of values that the verb returns.
CADRE_EXPORT std::vector<std::byte> encode_c10d_answer(StoreVerb verb,
                                                       const StoreResponse& response);
// Encodes the answer to a rank: a byte that says whether it is an error, then the bytes of
// encode_c10d_answer() or the error.
CADRE_EXPORT std::vector<std::byte> encode_answer(StoreVerb verb, const StoreResponse& response);

CADRE_EXPORT Result<Decoded<StoreResponse>> decode_c10d_answer(const StoreRequest& request,
                                                               ConstBytes stream,
                                                               Progress& progress);
CADRE_EXPORT Result<Decoded<StoreResponse>> decode_answer(const StoreRequest& request,
                                                          ConstBytes stream, Progress& progress);

}  // namespace cadre::wire
