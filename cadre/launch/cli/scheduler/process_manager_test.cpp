// Tests the client of PMI-1 against a server in this process, which answers as Hydra of MPICH 4.0
// does. The tests under an installed MPI are in tests/schedulers.
#include "cadre/launch/cli/scheduler/process_manager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/system.h"

namespace cadre::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Answers each line with the text for its command; closes the connection if there is none.
class Hydra {
 public:
  explicit Hydra(std::map<std::string, std::string> answers) : answers_(std::move(answers)) {
    std::array<int, 2> pair = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair.data()), 0);
    server_ = os::Fd(pair[0]);
    client_ = os::Fd(pair[1]);
    thread_ = system_->spawn("hydra", [this] { serve(); });
  }
  ~Hydra() { stop(); }

  os::Environment environment(const std::string& rank) const {
    os::Environment variables;
    variables.set("PMI_FD", cadre::format("{}", client_.get()));
    variables.set("PMI_RANK", rank);
    return variables;
  }
  Result<ManagedJob> ask(const std::string& rank, Duration limit = std::chrono::seconds(30)) {
    return ask_process_manager(environment(rank), "node0", system_->deadline_in(limit));
  }
  std::string error() {
    const auto job = ask("0");
    return job.ok() ? "no error" : job.error().message();
  }
  const std::vector<std::string>& stop() {
    ::shutdown(client_.get(), SHUT_RDWR);
    if (thread_ != nullptr) std::exchange(thread_, nullptr)->join();
    return requests_;
  }

 private:
  void serve() {
    std::string line;
    char next = 0;
    while (::read(server_.get(), &next, 1) == 1) {
      if (next != '\n') {
        line += next;
        continue;
      }
      requests_.push_back(line);
      const auto answer = answers_.find(line.substr(0, line.find(' ')));
      if (answer == answers_.end()) break;
      ::send(server_.get(), answer->second.data(), answer->second.size(), MSG_NOSIGNAL);
      line.clear();
    }
    ::shutdown(server_.get(), SHUT_RDWR);
  }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
  std::map<std::string, std::string> answers_;
  std::vector<std::string> requests_;
  os::Fd server_;
  os::Fd client_;
  std::unique_ptr<os::Thread> thread_;
};

const std::map<std::string, std::string> kAnswers{
    {"cmd=init", "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n"},
    {"cmd=get_my_kvsname", "cmd=my_kvsname kvsname=kvs_7_vm\n"},
    {"cmd=put", "cmd=put_result rc=0 msg=success\n"},
    {"cmd=barrier_in", "cmd=barrier_out\n"},
    {"cmd=get", "cmd=get_result rc=0 msg=success value=node0\n"},
    {"cmd=finalize", "cmd=finalize_ack\n"}};

std::map<std::string, std::string> with(const std::string& command, const std::string& answer) {
  auto answers = kAnswers;
  answers[command] = answer;
  return answers;
}

TEST(ProcessManager, TheFirstProcessGivesItsHostToTheOthers) {
  Hydra first(kAnswers);
  const auto job = first.ask("0").value_or_throw();
  EXPECT_EQ(job.id, "kvs_7_vm");
  EXPECT_EQ(job.first_host, "node0");
  EXPECT_THAT(
      first.stop(),
      ElementsAre("cmd=init pmi_version=1 pmi_subversion=1", "cmd=get_my_kvsname",
                  "cmd=put kvsname=kvs_7_vm key=cadre_first_host value=node0", "cmd=barrier_in",
                  "cmd=get kvsname=kvs_7_vm key=cadre_first_host", "cmd=finalize"));
  Hydra second(with("cmd=get", "cmd=get_result rc=0 msg=success value=other\n"));
  EXPECT_EQ(second.ask("1").value_or_throw().first_host, "other");
  EXPECT_EQ(second.stop().size(), 5U);  // the second process puts nothing
}

TEST(ProcessManager, AnAnswerThatIsNotTheExpectedOneIsNamed) {
  EXPECT_THAT(Hydra(with("cmd=put", "cmd=put_result rc=-1 msg=duplicate_key\n")).error(),
              HasSubstr("was answered with \"cmd=put_result rc=-1 msg=duplicate_key\""));
  EXPECT_THAT(Hydra(with("cmd=init", "HTTP/1.1 400\n")).error(), HasSubstr("\"HTTP/1.1 400\""));
  EXPECT_THAT(Hydra(with("cmd=get", "cmd=get_result rc=0\n")).error(), HasSubstr("has no value"));
  EXPECT_THAT(Hydra(with("cmd=get_my_kvsname", std::string(5000, 'x'))).error(),
              HasSubstr("more than 4096 bytes"));
  auto ends = kAnswers;
  ends.erase("cmd=barrier_in");
  EXPECT_THAT(Hydra(ends).error(), HasSubstr("has closed the connection"));
}

TEST(ProcessManager, AMissingProcessEndsTheWaitAtTheDeadline) {
  Hydra hydra(with("cmd=barrier_in", ""));
  const auto job = hydra.ask("1", std::chrono::milliseconds(50));
  ASSERT_FALSE(job.ok());
  EXPECT_EQ(job.error().code(), ErrorCode::kTimeout);
}

TEST(ProcessManager, AWrongDescriptorIsNamed) {
  os::Environment variables;
  EXPECT_FALSE(has_process_manager(variables));
  variables.set("PMI_FD", "7x");
  EXPECT_TRUE(has_process_manager(variables));
  const auto job = ask_process_manager(variables, "node0", Deadline(TimePoint{}));
  ASSERT_FALSE(job.ok());
  EXPECT_THAT(job.error().message(), HasSubstr("PMI_FD is \"7x\""));
}

}  // namespace
}  // namespace cadre::cli
