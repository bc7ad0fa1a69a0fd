// The native store protocol: handshake, requests and responses (docs/formats/store-native.md).
//
// Threads: plain values. Blocking: never. Errors: kCorruption for whatever the format does not
// allow. Every message travels in a frame (framing.h); decoders take the payload of one frame.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/wire/challenge.h"
#include "cadre/core/wire/store/store_request.h"

namespace cadre::wire {

// The first bytes of a client, before its first frame. c10d's clients begin with a zero byte.
inline constexpr std::string_view kStoreMagic = "CDRS";
inline constexpr uint16_t kStoreProtocol = 3;

inline constexpr size_t kMaxStoreFrameBytes = 64 << 20;
inline constexpr size_t kMaxHandshakeFrameBytes = 1024;
inline constexpr size_t kMaxKeyBytes = 4096;
inline constexpr size_t kMaxValueBytes = 16 << 20;
inline constexpr size_t kMaxKeysPerRequest = 1 << 16;
inline constexpr size_t kMaxBuildBytes = 64;

// Sent by both sides; with the server's build and protocol the client can name both if they differ.
struct StoreHello {
  uint16_t protocol = kStoreProtocol;
  std::string build;  // CADRE_VERSION
  Nonce nonce = {};

  friend bool operator==(const StoreHello&, const StoreHello&) = default;
};

// Sent by both sides, after the hellos.
struct StoreProof {
  Digest digest = {};

  friend bool operator==(const StoreProof&, const StoreProof&) = default;
};

// Whether the request has as many keys and values as its verb takes.
Status check_shape(const StoreRequest& request);

CADRE_EXPORT std::vector<std::byte> encode(const StoreHello& hello);
CADRE_EXPORT std::vector<std::byte> encode(const StoreProof& proof);
CADRE_EXPORT std::vector<std::byte> encode(const StoreRequest& request);
CADRE_EXPORT std::vector<std::byte> encode(const StoreResponse& response);

CADRE_EXPORT Result<StoreHello> decode_store_hello(ConstBytes payload);
CADRE_EXPORT Result<StoreProof> decode_store_proof(ConstBytes payload);
CADRE_EXPORT Result<StoreRequest> decode_store_request(ConstBytes payload);
CADRE_EXPORT Result<StoreResponse> decode_store_response(ConstBytes payload);

}  // namespace cadre::wire
