// Tests Cadre's store server and client against PyTorch's own TCPStore, in Python processes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/tcp/tcp_store.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/testing/core/paths.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kProcessSeconds = 90;  // a process that takes longer is killed

// Returns a command that runs a Python with torch; an empty text if this machine has none. Tries
// the same candidates as the build: CADRE_TORCH (a Python, or a torch folder), .venv, python3.
std::string find_python() {
  const char* named = std::getenv("CADRE_TORCH");
  std::vector<std::string> candidates;
  if (named && std::filesystem::is_directory(named)) {
    candidates.push_back(format("env PYTHONPATH={}/.. python3", named));
  } else if (named) {
    candidates.push_back(named);
  }
  candidates.push_back(testing::source_path(".venv/bin/python"));
  candidates.push_back("python3");
  for (const std::string& candidate : candidates) {
    const std::string probe = format(
        "{} -c 'import importlib.util as u; exit(not u.find_spec(\"torch\"))' >/dev/null 2>&1",
        candidate);
    if (std::system(probe.c_str()) == 0) return candidate;
  }
  return {};
}

// A torch_peer.py process. finish() reads its output to the end.
class TorchPeer {
 public:
  TorchPeer(const std::string& python, const std::string& arguments,
            const std::string& environment = "") {
    const std::string command =
        format("{} timeout -k 2 {} {} -W ignore {} {} 2>&1", environment, kProcessSeconds, python,
               testing::source_path("cadre/core/store/torch_peer.py"), arguments);
    pipe_ = popen(command.c_str(), "re");
  }
  ~TorchPeer() { finish(); }
  TorchPeer(const TorchPeer&) = delete;
  TorchPeer& operator=(const TorchPeer&) = delete;

  std::string read_line() {
    std::array<char, 4096> line;
    return pipe_ && fgets(line.data(), line.size(), pipe_) ? line.data() : "";
  }

  // Returns the rest of the output. Its last line is "ok" if all tests succeeded.
  std::string finish() {
    std::string output;
    if (!pipe_) return output;
    for (std::string line = read_line(); !line.empty(); line = read_line()) output += line;
    pclose(pipe_);
    pipe_ = nullptr;
    return output;
  }

 private:
  FILE* pipe_ = nullptr;
};

class TorchPeerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (python_.empty()) GTEST_SKIP() << "no Python with torch: set CADRE_TORCH to one";
  }

  std::unique_ptr<os::System> system_ = os::make_native_system();
  const std::string python_ = find_python();
};

TEST_F(TorchPeerTest, PythonsTcpStoreFindsEveryVerbInOurServer) {
  auto server = TcpStoreServer::start(*system_, {.token = "secret"}).value_or_throw();
  const std::string output =
      TorchPeer(python_, format("client {}", server->address().port)).finish();
  EXPECT_TRUE(output.ends_with("ok\n")) << output;
}

TEST_F(TorchPeerTest, UnmodifiedGlooRanksMeetAtOurServerBesideNativeOnes) {
  auto server = TcpStoreServer::start(*system_, {.token = "secret"}).value_or_throw();
  auto native = TcpStore::connect(*system_, {.address = server->address(), .token = "secret"},
                                  system_->deadline_in(seconds(10)))
                    .value_or_throw();
  std::vector<std::unique_ptr<TorchPeer>> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.push_back(std::make_unique<TorchPeer>(
        python_, "gloo",
        format("RANK={} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={} "
               "TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=0 OMP_NUM_THREADS=1",
               rank, server->address().port)));
  }
  EXPECT_EQ(native->add("beside", 1, system_->deadline_in(seconds(10))).value(), 1);
  for (auto& rank : ranks) {
    const std::string output = rank->finish();
    EXPECT_TRUE(output.ends_with("ok\n")) << output;
  }
}

// Tests every verb of Cadre's store against torch's server. The expected results are those in the
// documentation of c10d's Store.
void run_verbs(os::System& system, uint16_t port) {
  const auto soon = [&] { return system.deadline_in(seconds(20)); };
  const TcpStoreOptions options{.address = {os::Address::Kind::kTcp, "127.0.0.1", port},
                                .protocol = StoreProtocol::kC10d};
  auto store = TcpStore::connect(system, options, soon()).value_or_throw();
  const std::string value("bytes\0\xff", 7);
  EXPECT_TRUE(store->set("k", value, soon()).ok());
  EXPECT_EQ(store->get("k", soon()).value(), value);
  EXPECT_EQ(store->get("absent", system.deadline_in(milliseconds(100))).error().code(),
            ErrorCode::kTimeout);
  EXPECT_EQ(store->add("n", 5, soon()).value(), 5);
  EXPECT_EQ(store->add("n", -7, soon()).value(), -2);
  const std::vector<std::string> both = {"k", "n"};
  EXPECT_TRUE(store->wait(both, soon()).ok());
  EXPECT_TRUE(store->check(both, soon()).value());
  EXPECT_FALSE(store->check(std::vector<std::string>{"absent"}, soon()).value());
  EXPECT_EQ(store->compare_set("cas", "", "one", soon()).value(), "one");
  EXPECT_EQ(store->compare_set("cas", "one", "two", soon()).value(), "two");
  EXPECT_EQ(store->compare_set("cas", "one", "three", soon()).value(), "two");
  EXPECT_TRUE(store->append("log", "a", soon()).ok());
  EXPECT_TRUE(store->append("log", "b", soon()).ok());
  EXPECT_EQ(store->get("log", soon()).value(), "ab");
  const std::vector<std::string> keys = {"m1", "m2"};
  const std::vector<std::string> values = {"1", std::string(1 << 20, 'x')};
  EXPECT_TRUE(store->multi_set(keys, values, soon()).ok());
  EXPECT_TRUE(store->multi_get(keys, soon()).value() == values);
  const int64_t num_keys = store->num_keys(soon()).value();
  EXPECT_TRUE(store->erase("m1", soon()).value());
  EXPECT_FALSE(store->erase("m1", soon()).value());
  EXPECT_EQ(store->num_keys(soon()).value(), num_keys - 1);
  std::string got;
  auto waiting = system.spawn("waiting", [&] { got = store->get("later", soon()).value(); });
  EXPECT_TRUE(store->set("later", "now", soon()).ok());
  waiting->join();
  EXPECT_EQ(got, "now");
}

TEST_F(TorchPeerTest, OurClientFindsEveryVerbInTorchsServers) {
  TorchPeer peer(python_, "serve");
  const std::string line = peer.read_line();
  int with_libuv = 0;
  int without = 0;
  ASSERT_EQ(std::sscanf(line.c_str(), "%d %d", &with_libuv, &without), 2) << line << peer.finish();
  run_verbs(*system_, static_cast<uint16_t>(without));
  run_verbs(*system_, static_cast<uint16_t>(with_libuv));
  const TcpStoreOptions options{
      .address = {os::Address::Kind::kTcp, "127.0.0.1", static_cast<uint16_t>(with_libuv)},
      .protocol = StoreProtocol::kC10d};
  const Deadline soon = system_->deadline_in(seconds(20));
  auto store = TcpStore::connect(*system_, options, soon).value_or_throw();
  // Queues and list_keys() need libuv: without it torch's server has no queues and lists other
  // keys.
  EXPECT_TRUE(store->queue_push("q", "first", soon).ok());
  EXPECT_TRUE(store->queue_push("q", "second", soon).ok());
  EXPECT_EQ(store->queue_length("q", soon).value(), 2);
  EXPECT_EQ(store->queue_pop("q", soon).value(), "first");
  EXPECT_EQ(store->try_queue_pop("q", soon).value(), "second");
  EXPECT_EQ(store->try_queue_pop("q", soon).value(), std::nullopt);
  EXPECT_EQ(store->queue_pop("q", system_->deadline_in(milliseconds(100))).error().code(),
            ErrorCode::kTimeout);
  const auto keys = store->list_keys(soon).value();
  EXPECT_NE(std::find(keys.begin(), keys.end(), "log"), keys.end());
  EXPECT_TRUE(store->barrier("barrier", 1, soon).ok());
  // The peer may end before it has acknowledged this set(), so the result is ignored. The peer's
  // output shows that the request arrived.
  static_cast<void>(store->set("stop", "1", soon));
  const std::string output = peer.finish();
  EXPECT_TRUE(output.ends_with("ok\n")) << output;
}

}  // namespace
}  // namespace cadre
