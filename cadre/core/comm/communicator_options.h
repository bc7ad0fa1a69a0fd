// The options with which a group is connected.
//
// Threads: plain values. Blocking: never. Lifetime: the log is shared. Errors: none.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/log.h"
#include "cadre/core/comm/backend_factory.h"
#include "cadre/core/os/defaults.h"

namespace cadre {

enum class TransportChoice {
  kAuto,          // shared memory between ranks of one host, TCP between hosts
  kTcp,           // the net engine over TCP, even on one host
  kSharedMemory,  // the host engine, or an error if a rank is on another host
};

struct CommunicatorOptions {
  std::string name = "world";  // shown in messages; all ranks must pass the same name
  // Identifies the group in store keys, handshakes and flight records; equal on all ranks, unique
  // in the job. If empty, the name is used. split() and new_group() derive it, so that groups may
  // share a name.
  std::string id = {};
  Duration timeout = kDefaultOperationTimeout;
  Duration silence_limit = kDefaultSilenceLimit;  // the time without any message after which a peer
                                                  // on another host counts as lost
  TransportChoice transport = TransportChoice::kAuto;
  // Makes the engine of the group, and of the groups that are split off it. If it is empty,
  // `transport` chooses a native engine. core/comm/backend_factory.h says how to write an engine.
  BackendFactory backend = {};
  // The device of this rank and the factory of the engine for its memory. The group, and each group
  // that is split off it, has this engine beside the one for memory of the CPU. All ranks have one
  // or none has.
  std::optional<DeviceBackend> device_backend = {};
  // The numeric address at which the other ranks reach this host, never a wildcard address. If
  // empty, the addresses that the rendezvous found are used; they are loopback if all ranks are on
  // one host.
  std::string listen_host = {};
  std::string flight_record_path = {};  // file of the last operations; if empty, kept in memory
  // A file of `cadre tune` with the sizes at which collectives change their algorithms
  // (docs/formats/tuning-file.md). Only rank 0 reads its file, and gives the content to all ranks.
  // If empty, the default sizes are used. connect_from_environment() takes CADRE_TUNING_FILE.
  std::string tuning_file = {};
  // The content of such a file, which has precedence over it. In the options of a group: what rank
  // 0 has given, also to groups that are split off it.
  std::string tuning = {};
  std::shared_ptr<LogSink> log = {};  // shared with the group's threads; if null, lines are dropped
};

// Returns the id of a group that is connected with the options.
inline const std::string& id_of(const CommunicatorOptions& options) {
  return options.id.empty() ? options.name : options.id;
}

}  // namespace cadre
