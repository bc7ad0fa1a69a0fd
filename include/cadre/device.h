// The device of a process, on whose memory its groups work beside memory of the CPU.
//
//   const c10::Device device = cadre::local_device();  // cuda:LOCAL_RANK, or the CPU
//   const cadre::ProcessGroup world = cadre::init_process_group({.device = device});
//   const auto tensor = torch::full({3}, world.rank() + 1.0, device);
//   world.all_reduce(tensor);
//
// Declares:
// - `local_device()`: the device of this process when each process of a job uses one.
// - `device_engine()`, `DeviceEngineChoice`, `NcclOptions`: the engine for tensors on a device, for
//   CommunicatorOptions::device_backend: NCCL where every rank can use it, else the staged one.
// - `staged_engine()`: the engine that copies tensors on a device to the host and back.
//
// Design: docs/decisions/0043-collectives-on-devices.md, docs/decisions/0044-nccl.md. PyTorch:
// torch.cuda.set_device().
#pragma once

#include "cadre/tensor/backends/device_engine.h"
#include "cadre/tensor/backends/nccl/nccl_options.h"
#include "cadre/tensor/backends/staged_engine.h"
#include "cadre/tensor/device/local_device.h"
