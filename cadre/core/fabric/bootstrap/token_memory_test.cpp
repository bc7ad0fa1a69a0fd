// Tests that a core file of a connected rank does not contain the job's token.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <latch>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/rendezvous/environment_rendezvous.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/testing/core/own_process.h"

namespace cadre {
namespace {

using std::chrono::seconds;

constexpr size_t kTokenBytes = 48;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// A sanitizer reads the environment before main(), so one copy of the token is not removed.
constexpr size_t kCopiesOfTheSanitizer = 1;
#else
constexpr size_t kCopiesOfTheSanitizer = 0;
#endif

// The token is computed, so that the test program itself contains no copy of it.
constexpr char token_at(size_t i) {
  return static_cast<char>('a' + (i * 7 + i / 5) % 26);
}

size_t count_tokens(const std::vector<char>& bytes) {
  if (bytes.empty()) return 0;
  size_t count = 0;
  const char* const end = bytes.data() + bytes.size();
  const char* at = bytes.data();
  while ((at = static_cast<const char*>(
              std::memchr(at, token_at(0), static_cast<size_t>(end - at)))) != nullptr) {
    size_t length = 1;
    while (length < kTokenBytes && at + length < end && at[length] == token_at(length)) ++length;
    if (length == kTokenBytes) ++count;
    ++at;
  }
  return count;
}

struct Found {
  size_t in_core = 0;  // the number of tokens in memory that a core file contains
  size_t hidden = 0;   // the number of tokens in memory that a core file omits
};

// Searches the writable memory of this process for the token.
Found search_own_memory() {
  // Larger mappings are not searched: they belong to sanitizers.
  constexpr uint64_t kMaxMappingBytes = uint64_t{64} << 20;
  const os::Fd memory(::open("/proc/self/mem", O_RDONLY | O_CLOEXEC));
  std::ifstream maps("/proc/self/smaps");
  Found found;
  uint64_t begin = 0;
  uint64_t end = 0;
  bool is_writable = false;
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    std::string first, flags;
    fields >> first;
    if (first.back() != ':') {  // a line of the form "begin-end rw-p ..."
      fields >> flags;
      begin = std::stoull(first, nullptr, 16);
      end = std::stoull(first.substr(first.find('-') + 1), nullptr, 16);
      is_writable = flags[1] == 'w';
    } else if (first == "VmFlags:" && is_writable && end - begin <= kMaxMappingBytes) {
      bool is_left_out = false;
      while (fields >> flags) is_left_out |= flags == "dd";
      std::vector<char> bytes(end - begin);
      const ssize_t num_read =
          ::pread(memory.get(), bytes.data(), bytes.size(), static_cast<off_t>(begin));
      bytes.resize(num_read > 0 ? static_cast<size_t>(num_read) : 0);
      (is_left_out ? found.hidden : found.in_core) += count_tokens(bytes);
    }
  }
  return found;
}

// The next test starts a process with the job's environment variables, which runs this test.
TEST(TokenMemory, DISABLED_OfTwoConnectedRanks) {
  const auto system = os::make_native_system();
  const Deadline deadline = system->deadline_in(seconds(20));
  const JobEnvironment environment = read_job_environment().value_or_throw();
  ASSERT_EQ(environment.job_token.view().size(), kTokenBytes);
  ASSERT_EQ(environment.job_token.view()[5], token_at(5));
  const auto server =
      TcpStoreServer::start(*system, {.token = environment.job_token}).value_or_throw();
  Found found;
  std::latch is_searched(2);
  const auto connect = [&](Rank rank) {
    JobEnvironment own = environment;
    own.rank = rank;
    own.world_size = 2;
    own.master_addr = server->address().host;
    own.master_port = server->address().port;
    own.uses_agent_store = true;
    const Membership membership =
        EnvironmentRendezvous(*system, own).join(deadline).value_or_throw();
    const auto group =
        Communicator::connect(*system, membership, {.transport = TransportChoice::kTcp}, deadline);
    group->barrier({.deadline = deadline});
    if (rank == 0) found = search_own_memory();
    is_searched.arrive_and_wait();
    group->close(deadline);
  };
  std::thread other(connect, 1);
  connect(0);
  other.join();
  EXPECT_GE(found.hidden, 1u) << "the search finds the token in hidden memory";
  EXPECT_LE(found.in_core, kCopiesOfTheSanitizer);
}

TEST(TokenMemory, CoreFilesHaveNoToken) {
  std::string variable = "CADRE_JOB_TOKEN=";
  for (size_t i = 0; i < kTokenBytes; ++i) variable += token_at(i);
  EXPECT_EQ(testing::run_disabled_test("TokenMemory.DISABLED_OfTwoConnectedRanks",
                                       {"RANK=0", "WORLD_SIZE=1", variable}),
            "");
}

}  // namespace
}  // namespace cadre
