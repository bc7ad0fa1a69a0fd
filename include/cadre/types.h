// The vocabulary of all other headers: ranks, dtypes, reductions, byte spans, durations and
// deadlines.
//
//   std::vector<float> values(8);
//   const cadre::Bytes bytes = std::as_writable_bytes(std::span(values));
//   const size_t count = bytes.size() / cadre::size_of(cadre::DType::kFloat32);
//   const cadre::Deadline deadline = system->deadline_in(cadre::kDefaultOperationTimeout);
//   if (deadline.has_passed(system->now())) std::printf("too late for %zu values\n", count);
//
// Declares:
// - `Rank`: the number of a process in a group.
// - `Bytes`, `ConstBytes`: memory that a call borrows.
// - `DType`, `size_of()`, `parse_dtype()`: the dtype of elements, its size in bytes, and its name.
// - `ReduceOp`, `OpKind`, `to_string()`: how inputs are combined, and the kinds of operations.
// - `Device`, `DeviceType`: the device whose memory a buffer is in.
// - `EnumSet`: a set of values of an enumeration.
// - `Duration`, `TimePoint`, `Deadline`: a time span, a point in time, and the end of a wait.
// - `to_duration()`: converts any time span of std::chrono to a Duration. A span that is too long
//   becomes the longest Duration.
// - `Fingerprint`: 16 bytes that describe an operation and that ranks compare.
// - `kDefaultOperationTimeout` and the other default timeouts, each with the calls that it covers.
//
// Guide: docs/guide/running/errors.md. Source: ncclDataType_t, c10d::ReduceOp.
#pragma once

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/enum_set.h"
#include "cadre/core/base/fingerprint.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/defaults.h"
