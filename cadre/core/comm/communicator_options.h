// What a group is connected with.
//
// Threads: plain values. Blocking: never. Lifetime: the log is shared. Errors: none.
#pragma once

#include <memory>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/log.h"
#include "cadre/core/comm/backend_factory.h"
#include "cadre/core/os/defaults.h"

namespace cadre {

enum class TransportChoice {
  kAuto,          // shared memory where all ranks share a host, else TCP
  kTcp,           // the net engine over TCP, even on one host
  kSharedMemory,  // the host engine, or an error if a rank is on another host
};

struct CommunicatorOptions {
  std::string name = "world";  // in messages; equal on all ranks
  // Equal on all ranks, unique in the job: identifies the group in store keys, handshakes and
  // records. Empty: the name. split() and new_group() derive it, so that groups may share a name.
  std::string id = {};
  Duration timeout = kDefaultOperationTimeout;
  Duration silence_limit = kDefaultSilenceLimit;  // for a peer on another host
  TransportChoice transport = TransportChoice::kAuto;
  // Makes the engine of the group, and of the groups that are split off it; empty: a native one, as
  // `transport` says. core/comm/backend_factory.h says how to write one.
  BackendFactory backend = {};
  // The numeric address that the other ranks reach, never all of them. Empty: where the rendezvous
  // found that they reach this host, which is loopback as long as all are on one.
  std::string listen_host;
  std::string flight_record_path;  // a mapped ring of the last operations; empty: memory only
  std::shared_ptr<LogSink> log;    // shared with the group's threads; null: dropped
};

// The id of a group that is connected with the options.
inline const std::string& id_of(const CommunicatorOptions& options) {
  return options.id.empty() ? options.name : options.id;
}

}  // namespace cadre
