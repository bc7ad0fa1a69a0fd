// One send or receive of one rank as a value, for calls that issue several at once.
//
// Threads: plain values. Blocking: never. Lifetime: borrows the bytes. Errors: none; the call that
// issues the message throws for invalid arguments. Source: c10d's P2POp.
#pragma once

#include "cadre/core/base/types.h"

namespace cadre {

// The source of a receive that accepts a message from any rank. Same as MPI_ANY_SOURCE.
inline constexpr Rank kAnySource = -1;

struct MessageCall {
  static MessageCall send(ConstBytes data, DType dtype, Rank destination, int tag) {
    return {.kind = OpKind::kSend, .peer = destination, .tag = tag, .dtype = dtype, .in = data};
  }
  static MessageCall recv(Bytes data, DType dtype, Rank source, int tag) {
    return {.kind = OpKind::kRecv, .peer = source, .tag = tag, .dtype = dtype, .out = data};
  }

  OpKind kind = OpKind::kSend;
  Rank peer = 0;  // kAnySource: a receive accepts a message from any rank
  int tag = 0;
  DType dtype = DType::kUint8;
  ConstBytes in = {};  // the bytes that a send sends
  Bytes out = {};      // the bytes that a receive fills

  size_t num_bytes() const { return kind == OpKind::kSend ? in.size() : out.size(); }
};

}  // namespace cadre
