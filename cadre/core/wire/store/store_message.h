// The protocol of the store: that of c10d's TCPStore, as torch 2.11 to 2.13 speak it, and verbs of
// Cadre's own, by which a client proves the job's token (docs/formats/store-tcp.md).
//
// Threads: plain values. Blocking: never.
// Errors: kCorruption for bytes that no client sends, or beyond the limits below.
// Messages carry no length, so decoders take the bytes that have come and say whether they suffice.
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
// Version of the verbs of Cadre's own; a hello names it.
inline constexpr int64_t kStoreProtocol = 4;

// Limits of a Store.
inline constexpr size_t kMaxKeyBytes = 4096;
inline constexpr size_t kMaxValueBytes = 16 << 20;
// Limits of the protocol. Clients of c10d may have longer keys (8 KiB with libuv), and those of a
// Store get a prefix.
inline constexpr size_t kMaxSentKeyBytes = 8 << 10;
inline constexpr size_t kMaxKeysPerRequest = 1 << 16;
inline constexpr size_t kMaxMessageBytes = 64 << 20;  // of a request, and of an answer
inline constexpr size_t kMaxBuildBytes = 64;

// Answer to kWait and kBarrier, and to kCancel of a c10d client.
inline constexpr int64_t kC10dStopWaiting = 0;
inline constexpr int64_t kC10dWaitCanceled = 1;

// Whether the request has as many keys and values as its verb takes.
Status check_shape(const StoreRequest& request);
// Whether the verb is about the connection that it is sent on, so that no Store gets it.
bool is_of_connection(StoreVerb verb);

// How far a message that is not whole has been looked at. Passed to the next attempt, it keeps a
// long message that comes in pieces from being read anew with each of them. A decoder resets it
// when the message is whole.
struct Progress {
  size_t num_needed = 0;   // no attempt before so many bytes have come
  size_t num_bytes = 0;    // that end with a whole text
  uint64_t num_texts = 0;  // of a list, which those bytes hold
};

// What the first bytes of a stream held.
template <typename T>
struct Decoded {
  std::optional<T> message;  // nullopt: more bytes are needed
  size_t num_bytes = 0;      // size of the message, or the least total size worth another try
};

// REQUIRES: check_shape(request).ok().
CADRE_EXPORT std::vector<std::byte> encode(const StoreRequest& request);
CADRE_EXPORT Result<Decoded<StoreRequest>> decode_store_request(ConstBytes stream,
                                                                Progress& progress);

// The answer to a client of c10d, which cannot be an error. REQUIRES: the response has no error and
// the values that its verb promises.
CADRE_EXPORT std::vector<std::byte> encode_c10d_answer(StoreVerb verb,
                                                       const StoreResponse& response);
// The same after a byte that tells whether it is an error.
CADRE_EXPORT std::vector<std::byte> encode_answer(StoreVerb verb, const StoreResponse& response);

CADRE_EXPORT Result<Decoded<StoreResponse>> decode_c10d_answer(const StoreRequest& request,
                                                               ConstBytes stream,
                                                               Progress& progress);
CADRE_EXPORT Result<Decoded<StoreResponse>> decode_answer(const StoreRequest& request,
                                                          ConstBytes stream, Progress& progress);

}  // namespace cadre::wire
