// Tests `cadre doctor` as a command: on this host, and two of them over loopback.
#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>

#include "cadre/core/rendezvous/tcp_rendezvous.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/doctor/peer_check.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

constexpr std::array kSections{"names",         "addresses",     "ports",      "clocks", "limits",
                               "control group", "shared memory", "huge pages", "cores",  "disks",
                               "GPUs",          "libraries",     "Python"};

TEST(DoctorCommand, ChecksThisHostAsATable) {
  const auto result = run_cadre({"doctor"});
  EXPECT_EQ(result.error, "");
  EXPECT_EQ(result.exit_code, result.output.find("\n  problem") == std::string::npos ? 0 : 1);
  for (const std::string section : kSections) {
    EXPECT_NE(("\n" + result.output).find("\n" + section + "\n"), std::string::npos)
        << section << "\n"
        << result.output;
  }
  EXPECT_TRUE(std::regex_search(
      result.output, std::regex("\n[0-9]+ findings: [0-9]+ problems?, [0-9]+ notes?\n$")));
  EXPECT_EQ(result.output.find('\033'), std::string::npos);
}

TEST(DoctorCommand, ChecksThisHostAsJson) {
  const auto result = run_cadre({"doctor", "--json", "--port", "1"}, {{"TMPDIR", "/none/such"}});
  EXPECT_EQ(result.exit_code, 1);
  const auto report = nlohmann::json::parse(result.output);
  int num_problems = 0;
  bool names_folder = false;
  bool names_port = false;
  for (const auto& finding : report["findings"]) {
    if (finding["state"] == "problem") ++num_problems;
    names_port = names_port || finding["name"] == "port 1";
    if (finding["name"] != "TMPDIR") continue;
    names_folder = true;
    EXPECT_EQ(finding["state"], "problem");
    EXPECT_EQ(finding["remedy"], "export TMPDIR=/path/with/space");
  }
  EXPECT_EQ(report["num_problems"], num_problems);
  EXPECT_TRUE(names_folder);
  EXPECT_TRUE(names_port);
}

TEST(DoctorCommand, RefusesInvalidCommandLines) {
  struct Case {
    std::vector<std::string> words;
    std::string error;
  };
  const testing::TemporaryFolder folder;
  for (const auto& [words, error] :
       {Case{{"--prot", "1"}, "--port"},
        Case{{"--port", "0"}, "--port 0: expected a number from 1 to 65535"},
        Case{{"--port", "1", "--listen"}, "--port 1 has a meaning only without --listen"},
        Case{{"--timeout", "5"}, "--timeout 5 has a meaning only with --listen or HOST:PORT"},
        Case{{"--listen", "--timeout", "soon"}, "expected a number from 1 to 86400"},
        Case{{"127.0.0.1"}, "\"127.0.0.1\": expected HOST:PORT"},
        Case{{"127.0.0.1:0"}, "port 0 is no port"}, Case{{"a:1", "b:2"}, "\"b:2\" follows \"a:1\""},
        Case{{"10.0.0.1:29500"}, "10.0.0.1 is not a loopback address"},
        Case{{"--listen", "0.0.0.0:0"}, "0.0.0.0 is not a loopback address"},
        Case{{"--listen", "--token-file", folder.file("none")}, "No such file"}}) {
    std::vector<std::string> all = words;
    all.insert(all.begin(), "doctor");
    const auto result = run_cadre(all, {{"CADRE_JOB_TOKEN", ""}});
    EXPECT_EQ(result.exit_code, kUsageExitCode) << error;
    EXPECT_NE(result.error.find(error), std::string::npos) << result.error;
    EXPECT_EQ(result.output, "");
  }
}

class TwoDoctors : public ::testing::Test {
 protected:
  std::string write_token(const std::string& name, const std::string& token) {
    std::ofstream(folder_.file(name)) << token << "\n";
    std::filesystem::permissions(folder_.file(name), std::filesystem::perms::owner_read);
    return folder_.file(name);
  }

  // Starts a listener. Returns the address that it prints for the peer.
  std::string listen(std::vector<std::string> options) {
    options.insert(options.begin(), {"doctor", "--listen"});
    listener_ = std::make_unique<CadreCommand>(std::move(options));
    EXPECT_TRUE(listener_->wait_for("run on this host: cadre doctor "));
    EXPECT_TRUE(listener_->wait_for("\n"));
    std::smatch found;
    const std::string error = listener_->seen().error;
    EXPECT_TRUE(std::regex_search(error, found, std::regex("cadre doctor ([0-9.]+:[0-9]+)")))
        << error;
    return found[1];
  }

  static void expect_measured(const CommandResult& result) {
    EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
    for (const char* name :
         {"connection", "round trip", "to the peer", "from the peer", "wall clocks"}) {
      EXPECT_NE(result.output.find(name), std::string::npos) << result.output;
    }
  }

  testing::TemporaryFolder folder_;
  std::unique_ptr<CadreCommand> listener_;
};

TEST_F(TwoDoctors, MeasureLoopbackWithoutAToken) {
  const std::string address = listen({});
  EXPECT_TRUE(address.starts_with("127.0.0.1:")) << address;
  expect_measured(run_cadre({"doctor", address}));
  expect_measured(listener_->wait());
  EXPECT_TRUE(listener_->leaves_nothing());
}

TEST_F(TwoDoctors, MeasureAnotherAddressWithATokenAsJson) {
  const std::string token = write_token("token", "correct horse");
  const std::string address = listen({"127.0.0.2:0", "--token-file", token, "--json"});
  EXPECT_TRUE(address.starts_with("127.0.0.2:")) << address;
  expect_measured(run_cadre({"doctor", address, "--token-file", token}));
  const auto result = listener_->wait();
  EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
  const auto report = nlohmann::json::parse(result.output);
  EXPECT_NE(report["findings"][0]["seen"].get<std::string>().find("from 127.0.0.1 on lo"),
            std::string::npos);
  EXPECT_GT(report["findings"][2]["numbers"]["bytes_per_s"], 0);
}

TEST_F(TwoDoctors, AWrongTokenAndAStrangerAreRefusedAndTheRightPeerIsServed) {
  const std::string token = write_token("token", "correct horse");
  const std::string address = listen({"127.0.0.1:0", "--token-file", token});
  const auto refused = run_cadre(
      {"doctor", address, "--token-file", write_token("wrong", "battery staple"), "--json"});
  EXPECT_EQ(refused.exit_code, 1);
  const auto report = nlohmann::json::parse(refused.output);
  EXPECT_NE(report["findings"][0]["seen"].get<std::string>().find("token"), std::string::npos)
      << refused.output;
  EXPECT_NE(report["findings"][0]["meaning"].get<std::string>().find("another token"),
            std::string::npos)
      << refused.output;
  const auto system = os::make_native_system();
  const auto stranger = system
                            ->connect(os::Address::parse("tcp:" + address).value_or_throw(),
                                      system->deadline_in(kPatience))
                            .value_or_throw();
  constexpr std::string_view kRubbish = "GET / HTTP/1.1\r\n\r\n";
  EXPECT_TRUE(stranger->try_send(std::as_bytes(std::span(kRubbish))).ok());
  EXPECT_TRUE(listener_->wait_for("its first bytes belong to no known protocol"));
  expect_measured(run_cadre({"doctor", address}, {{"CADRE_JOB_TOKEN", "correct horse"}}));
  expect_measured(listener_->wait());
}

// The first peer has come as far as the store, and does not connect.
TEST_F(TwoDoctors, ASecondPeerIsToldThatTheListenerServesAnother) {
  const std::string token = write_token("token", "correct horse");
  const std::string address = listen({"127.0.0.1:0", "--token-file", token});
  const auto system = os::make_native_system();
  const auto first =
      TcpRendezvous(*system, {.address = os::Address::parse("tcp:" + address).value_or_throw(),
                              .rank = 1,
                              .world_size = 2,
                              .job_token = "correct horse",
                              .may_host_store = false,
                              .round = kFirstDoctorRound})
          .join(system->deadline_in(kPatience));
  EXPECT_TRUE(first.ok());
  const auto second = run_cadre({"doctor", address, "--token-file", token, "--json"});
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_NE(second.output.find("serves another peer already"), std::string::npos) << second.output;
  const auto result = listener_->wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.output.find("problem  connection"), std::string::npos) << result.output;
}

// The address and the token may be those of a job that is about to start.
TEST_F(TwoDoctors, AJobIsNotDisturbed) {
  const auto system = os::make_native_system();
  const auto server =
      TcpStoreServer::start(
          *system, {.address = {os::Address::Kind::kTcp, "127.0.0.1", 0}, .token = "secret"})
          .value_or_throw();
  const std::string address = cadre::format("127.0.0.1:{}", server->address().port);
  const auto result = run_cadre(
      {"doctor", address, "--token-file", write_token("token", "secret"), "--timeout", "2"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.output.find("a store answers at " + address), std::string::npos)
      << result.output;
  std::vector<std::unique_ptr<os::Thread>> ranks;
  std::array<std::string, 2> failures;
  for (const int rank : {0, 1}) {
    ranks.push_back(system->spawn("rank", [&, rank] {
      const auto membership = TcpRendezvous(*system, {.address = server->address(),
                                                      .rank = rank,
                                                      .world_size = 2,
                                                      .job_token = "secret",
                                                      .may_host_store = false})
                                  .join(system->deadline_in(kPatience));
      if (!membership.ok()) {
        failures.at(static_cast<size_t>(rank)) = membership.error().message();
      }
    }));
  }
  for (const auto& rank : ranks) rank->join();
  EXPECT_EQ(failures[0], "");
  EXPECT_EQ(failures[1], "");
}

TEST_F(TwoDoctors, AnExposedTokenIsNoted) {
  const std::string token = write_token("token", "correct horse");
  std::filesystem::permissions(
      token, std::filesystem::perms::owner_read | std::filesystem::perms::others_read);
  const auto result = run_cadre({"doctor", "127.0.0.1:1", "--token-file", token, "--timeout", "1"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.output.find("$ chmod 600 " + token), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("No cadre doctor --listen answers there"), std::string::npos)
      << result.output;
}

}  // namespace
}  // namespace cadre::cli
