// Errors as values and as exceptions, with codes that name the remedy.
//
//   try {
//     world.all_reduce(x);
//   } catch (const cadre::Error& error) {
//     if (error.code() == cadre::ErrorCode::kInvalidArgument) throw;
//     std::fprintf(stderr, "%s\n", error.what());
//   }
//
// Declares:
// - `Error`: the exception of all public calls: a code, a message, and the rank at fault where
//   there is one.
// - `ErrorCode`, `to_string()`: says what to do: fix the program, restart or rejoin, retry, resume.
// - `ErrorDetails`: the fields of an error in addition to its code and message.
// - `Result`, `Status`: a value or an Error; success or an Error.
//
// Guide: docs/guide/running/errors.md. PyTorch: torch.distributed.DistBackendError.
#pragma once

#include "cadre/core/base/error.h"
