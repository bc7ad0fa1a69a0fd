// A stream-ordered engine for memory of the late device (late_device.h): submit() only enqueues, as
// that of NCCL, and the ranks exchange bytes with fake peers when the stream runs.
//
// Threads: those of Backend. Blocking: submit() never; the destructor, until everything enqueued
// has run. Errors: those of the peers and of FakeCalls, when the Completion completes. The engine
// cannot be aborted. For tests only.
#pragma once

#include <memory>

#include "cadre/core/comm/backend_factory.h"
#include "cadre/testing/core/fake_backend.h"
#include "cadre/testing/core/fake_peers.h"

namespace cadre::testing {

// Returns the engine for CommunicatorOptions::device_backend of the rank that uses
// late::device(index). `report_delay`: the time between the end of an operation on its stream and
// the end of its Completion.
DeviceBackend late_engine(int index, std::shared_ptr<FakePeers> peers,
                          std::shared_ptr<FakeCalls> calls = std::make_shared<FakeCalls>(),
                          Duration report_delay = Duration(0));

}  // namespace cadre::testing
