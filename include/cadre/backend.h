// How an engine of the program's own, such as NCCL or MPI, moves and reduces the bytes of a group.
//
//   struct Mine final : cadre::Backend {
//     cadre::Capabilities capabilities() const override {
//       return cadre::full_capabilities("mine");
//     }
//     cadre::Completion submit(const cadre::OpContext&,
//                              std::span<const cadre::Collective>) override {
//       return cadre::Error(cadre::ErrorCode::kInternal, "mine: it moves nothing yet");
//     }
//   };
//   cadre::CommunicatorOptions with_engine;
//   with_engine.backend =
//       [](const cadre::BackendSetup&) -> cadre::Result<std::unique_ptr<cadre::Backend>> {
//     return std::unique_ptr<cadre::Backend>(std::make_unique<Mine>());
//   };
//
// Declares:
// - `Backend`: the interface of an engine.
// - `Capabilities`, `full_capabilities()`: what an engine supports; a group throws for all other
//   calls.
// - `check_supported()`, `unsupported()`: checks a call against the capabilities, and the error.
// - `Completion`: the end of a submitted collective.
// - `run_in_order()`: submit() of an engine that runs one collective after the other.
// - `BackendFactory`, `BackendSetup`: makes the engine of a group; see
//   CommunicatorOptions::backend.
// - `DeviceBackend`, `DevicePoint`: an engine for memory of a device; see
//   CommunicatorOptions::device_backend.
//
// Design: docs/decisions/0015-engines-as-plug-ins.md. PyTorch: c10d::Backend.
#pragma once

#include "cadre/core/collective/backend.h"
#include "cadre/core/collective/completion.h"
#include "cadre/core/comm/backend_factory.h"
