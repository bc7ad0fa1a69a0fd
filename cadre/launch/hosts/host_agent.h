// The agent of this host in a job on several hosts: a thread that runs the state machine `Agent`
// over connections, and serves the store of a round while this agent coordinates the job.
//
// Threads: the methods from the owner's thread; "cadre-agent" for the rest. Blocking: the
// destructor, for a second at most. Lifetime: borrows the System and the log. Errors: start()
// throws the Error of System::spawn(). The owner performs the orders in their sequence and reports
// when its workers have ended.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/log.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/core/wire/recovery/recovery_files.h"
#include "cadre/launch/agent/agent.h"
#include "cadre/launch/hosts/agent_links.h"
#include "cadre/launch/hosts/registry_watch.h"

namespace cadre::launch {

struct HostAgentOptions {
  AgentOptions agent;  // `self.address` is where `listeners` are reached
  os::Secret token;
  std::vector<std::unique_ptr<os::Listener>> listeners;
  // Says where the coordinator is; null if `agent.endpoint` never changes.
  std::unique_ptr<CoordinatorRegistry> registry;
  std::string registry_name;
};

// What the owner has to do with this host's workers.
struct HostOrder {
  enum class Kind : uint8_t {
    kStart,  // the workers of `round`, with `ranks`; their store is at store_host:store_port
    kStop,   // ask the workers to stop, and kill them after the grace period; those that wait for
             // a new membership stay
    kNameLost,  // tell the workers that can wait which ranks of their round have lost their hosts
    kKill,      // because workers of another round may start elsewhere: at once, or those that can
                // wait for a new membership at `by`
    kSay,       // show `text` to the user
    kEnd,       // the job is over for this host, with `exit_code`; `text` says why
  };
  Kind kind = Kind::kSay;
  uint64_t round = 0;
  uint32_t num_restarts = 0;
  AgentId job_id = 0;  // the same in all rounds of the job, and different in each job
  HostRanks ranks{};
  std::string store_host;
  uint16_t store_port = 0;  // 0 if the coordinator could not open the store
  // kStop: the round ends because hosts have joined, so that workers run and do not come to wait.
  bool is_for_newcomers = false;
  std::vector<RankRange> lost_ranks{};  // kNameLost: all until now
  TimePoint by{};
  std::string text;
  int exit_code = 0;
};

class HostAgent {
 public:
  HostAgent(os::System& system, HostAgentOptions options, LogSink& log);
  ~HostAgent();
  HostAgent(const HostAgent&) = delete;
  HostAgent& operator=(const HostAgent&) = delete;

  // Returns an object that is readable while there are orders.
  os::Pollable& pollable() { return *has_orders_; }
  std::vector<HostOrder> take_orders();

  // Reports that all workers of the present round have ended on this host.
  void workers_ended(Outcome outcome, std::string reason);
  // Leaves the job: the user or the scheduler stops this host.
  void leave();

 private:
  struct Report {
    bool is_leaving = false;
    Outcome outcome = Outcome::kNone;
    std::string reason;
  };

  void run();
  void tell(Report report);
  void hear_reports();
  void hear_links();
  // Tells the registry's thread what this agent is, and the agent where the coordinator is.
  void hear_registry();
  // Performs the actions of the agent, until there are none.
  void perform();
  void perform(AgentAction action);
  void order(HostOrder order);
  void start_workers(const AgentAction& action);
  bool has_round_ended_for_newcomers() const;
  std::vector<RankRange> lost_ranks() const;
  void name_lost_ranks();
  // Returns the port of the store of the round, which this agent serves; 0 if it could not open it.
  uint16_t store_port(uint64_t round);

  os::System& system_;
  const AgentOptions options_;
  const os::Secret token_;
  LogSink& log_;
  const std::unique_ptr<os::Event> wake_up_;
  const std::unique_ptr<os::Event> has_orders_;

  std::mutex mutex_;  // guards the next three members
  std::vector<HostOrder> orders_;
  std::vector<Report> reports_;
  bool is_stopping_ = false;

  // The members from here on belong to the thread.
  Agent agent_;
  AgentLinks links_;
  std::unique_ptr<RegistryWatch> watch_;
  std::unique_ptr<TcpStoreServer> store_;
  uint64_t store_round_ = 0;
  std::vector<RankRange> named_;    // the lost ranks in the last order of the round
  Table table_at_start_;            // the table with which the workers of the round were started
  uint16_t remote_store_port_ = 0;  // the port in the last message

  std::unique_ptr<os::Thread> thread_;
};

// Divides "HOST:PORT" or "[IPV6]:PORT".
os::Address address_of_agent(std::string_view address);

}  // namespace cadre::launch
