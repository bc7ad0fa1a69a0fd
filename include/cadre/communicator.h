// A group of ranks over bytes, complete without torch: collectives, messages and shared memory.
//
//   const auto system = cadre::os::make_native_system();
//   const auto group = cadre::connect_from_environment(
//       *system, {}, system->deadline_in(cadre::kDefaultConnectTimeout));
//   float sum = static_cast<float>(group->rank() + 1);
//   const auto bytes = std::as_writable_bytes(std::span(&sum, 1));
//   group->all_reduce(bytes, bytes, cadre::DType::kFloat32, cadre::ReduceOp::kSum);
//   const cadre::Work work = group->barrier_async();
//   work.wait(system->deadline_in(std::chrono::seconds(5)));
//   group->close(system->deadline_in(cadre::kDefaultCloseTimeout));
//
// Declares:
// - `Communicator`: the group.
// - `CommunicatorOptions`, `TransportChoice`, `id_of()`: the name, timeouts, transport, backend and
//   log of a group.
// - `connect_from_environment()`: joins the job that the launcher has described.
// - `Work`, `CollectiveOptions`: the handle of an asynchronous operation, and options of
//   operations.
// - `MessageCall`, `kAnySource`: one send or receive, for calls that issue several.
// - `SymmetricBuffer`: memory that the ranks of a host read and write in place.
// - `PeerStatus`: what a group knows about another rank.
//
// Guide: docs/guide/reference/groups-and-messages.md. PyTorch: c10d::ProcessGroup; NCCL:
// ncclComm_t.
#pragma once

#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/communicator_options.h"
#include "cadre/core/comm/connect.h"
#include "cadre/core/comm/messages/message_call.h"
#include "cadre/core/comm/queue/work.h"
#include "cadre/core/comm/symmetric/symmetric_buffer.h"
