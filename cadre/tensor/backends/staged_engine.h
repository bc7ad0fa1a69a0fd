// An engine for memory of any type of device: it copies the buffers to pinned memory of the host,
// runs the collective with the group's engine for memory of the CPU, and copies the result to the
// device. Any number of processes may share a device.
//
// A long collective runs in pieces: while the host works on one piece, the device copies the
// previous and the next one.
// Threads: those of Backend. Blocking: submit(), until the result is on the device; so a Work of
// this engine waits on the host, other than one of a stream-ordered engine. Lifetime: two pieces of
// pinned memory as long as the engine; collectives that are not divided (gather, scatter,
// all_to_all and those with uneven parts) need as much pinned memory as their buffers have.
// Errors: those of the host's engine; kTimeout if the work of the caller that precedes the
// collective, or a copy, has not ended by the deadline, with phase "device"; kAborted. After such
// an error the device may still read the inputs if the caller's own work has not ended. Numerics:
// those of the host's engine, piece by piece. Source: how MPI implementations without CUDA support
// are used; double buffering as in NCCL's proxy.
#pragma once

#include <cstddef>

#include "cadre/core/base/export.h"
#include "cadre/core/comm/backend_factory.h"

namespace cadre {

// The number of bytes of one piece on the host.
inline constexpr size_t kStagedPieceBytes = size_t{4} << 20;

// Returns a factory for CommunicatorOptions::device_backend. All ranks pass the same size: it
// decides how collectives are divided. Another size, or another engine, is kInvalidArgument on all
// ranks.
CADRE_EXPORT BackendFactory staged_engine(size_t piece_bytes = kStagedPieceBytes);

}  // namespace cadre
