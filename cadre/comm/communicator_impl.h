// The parts of a Communicator and the order in which they live and die.
//
// Threads, blocking, errors: as Communicator. Private to comm.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "cadre/collective/backend.h"
#include "cadre/comm/bootstrap/host_group.h"
#include "cadre/comm/bootstrap/mesh.h"
#include "cadre/comm/collective_runner.h"
#include "cadre/comm/communicator.h"
#include "cadre/comm/flight_recorder.h"
#include "cadre/comm/home_process.h"
#include "cadre/comm/messages/message_queue.h"
#include "cadre/comm/monitor.h"
#include "cadre/comm/queue/operation_queue.h"
#include "cadre/comm/symmetric_heap.h"
#include "cadre/os/interrupt.h"
#include "cadre/transport/transport.h"

namespace cadre {

class Communicator::Impl {
 public:
  Impl(os::System& system_in, const Membership& membership_in,
       const CommunicatorOptions& options_in, Deadline deadline);
  ~Impl();

  // Throws in a child of the group's process: what every call begins with.
  Impl& at_home() {
    home->check();
    return *this;
  }
  // Says goodbye, or aborts when something is pending that may not be waited for.
  void close(Deadline deadline);
  void abort(const std::string& reason);

  os::System& system;
  const CommunicatorOptions options;
  const std::string id;
  const Membership membership;
  const Rank rank;
  const int world_size;
  std::string_view backend_name = "solo";

  // Shared with Works and symmetric buffers, which may outlive the group.
  const std::shared_ptr<const HomeProcess> home;

  // Parts stand above those that use them.
  os::Interrupt interrupt;
  std::optional<HostGroup> host;
  std::unique_ptr<FlightRecorder> recorder;
  std::unique_ptr<Monitor> monitor;
  std::unique_ptr<Transport> transport;  // of the net engine
  std::unique_ptr<Transport> message_transport;
  std::shared_ptr<HostEngine> host_engine;  // shared with symmetric buffers, weakly
  std::unique_ptr<Backend> net_engine;
  std::unique_ptr<SymmetricHeap> heap;
  std::unique_ptr<CollectiveRunner> runner;
  // Shared with Works, which may outlive the group.
  std::shared_ptr<OperationQueue> queue;
  std::shared_ptr<MessageQueue> messages;  // null for a world of one

 private:
  std::unique_ptr<FlightRecorder> make_recorder(const wire::RankCard& own) const;
  void connect(Deadline deadline);
  void build_host_engine(const Mesh& mesh, Deadline deadline);
  void build_net_engine(Mesh& mesh);
  void start_monitor(Mesh& mesh);
  std::vector<std::unique_ptr<os::Pollable>> watch_processes(
      const StatusPage& page, const std::vector<int>& slots,
      const std::vector<wire::RankCard>& cards) const;
  void log_start(uint64_t round, const wire::RankCard& own, const Backend* backend) const;
  bool is_idle() const;
  // Whether nothing is left at the deadline.
  bool drain(Deadline deadline);
  void stop_threads();
  void release();

  int num_hosts_ = 1;
  const int num_exceptions_ = std::uncaught_exceptions();  // when the group was made
  std::atomic<bool> is_closed_{false};
};

}  // namespace cadre
