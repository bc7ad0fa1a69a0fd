// Where the lines of the log go: a program may pass a sink of its own.
//
//   struct ToStderr final : cadre::LogSink {
//     void write(cadre::LogLevel, std::string_view component,
//                std::string_view message) override {
//       std::fprintf(stderr, "%s: %s\n", std::string(component).c_str(),
//                    std::string(message).c_str());
//     }
//   };
//   const cadre::CommunicatorOptions logged{.log = std::make_shared<ToStderr>()};
//
// Declares:
// - `LogSink`, `LogLevel`: the interface of a sink, and the levels.
// - `null_log_sink()`: a sink that drops every line.
//
// Guide: docs/guide/running/errors.md. PyTorch: TORCH_DISTRIBUTED_DEBUG.
#pragma once

#include "cadre/core/base/log.h"
