// Measures what idle clients of the store cost: the server's memory for each of them, and the
// latency of one busy client. Prints a line with one JSON object for each number of idle clients
// that is given.
#include <cadre/core.h>
#include <cadre/core/store/tcp/tcp_store.h>
#include <cadre/core/store/tcp/tcp_store_server.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

namespace {

using cadre::Deadline;

// Runs in the server's process. Writes the server's port to `answers`, and then its resident bytes
// each time it reads a byte from `requests`.
void serve(int requests, int answers) {
  const auto system = cadre::os::make_native_system();
  auto server = cadre::TcpStoreServer::start(*system, {.token = "bench"}).value_or_throw();
  const int64_t port = server->address().port;
  if (write(answers, &port, sizeof(port)) != sizeof(port)) return;
  char byte = 0;
  while (read(requests, &byte, 1) == 1) {
    int64_t num_pages = 0;
    std::ifstream("/proc/self/statm") >> num_pages >> num_pages;
    const int64_t num_bytes = num_pages * sysconf(_SC_PAGESIZE);
    if (write(answers, &num_bytes, sizeof(num_bytes)) != sizeof(num_bytes)) return;
  }
}

struct Latency {
  double us_p50 = 0;
  double us_p99 = 0;
};

// Measures the latency of a set followed by a get.
Latency measure(cadre::os::System& system, cadre::TcpStore& store) {
  constexpr int kWarmUp = 200;
  constexpr int kCalls = 4000;
  std::vector<double> times_us;
  for (int i = 0; i < kWarmUp + kCalls; ++i) {
    const Deadline deadline = system.deadline_in(std::chrono::seconds(10));
    const auto start = system.now();
    store.set("key", "value", deadline).value_or_throw();
    store.get("key", deadline).value_or_throw();
    const std::chrono::duration<double, std::micro> taken = system.now() - start;
    if (i >= kWarmUp) times_us.push_back(taken.count());
  }
  std::sort(times_us.begin(), times_us.end());
  return {times_us[kCalls / 2], times_us[kCalls * 99 / 100]};
}

}  // namespace

int main(int argc, char** argv) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  int requests[2];
  int answers[2];
  if (pipe(requests) != 0 || pipe(answers) != 0) return 1;
  const pid_t server = fork();
  if (server == 0) {
    close(requests[1]);
    serve(requests[0], answers[1]);
    _exit(0);
  }
  close(requests[0]);
  close(answers[1]);
  const auto ask = [&](bool is_first) {
    int64_t answer = 0;
    const bool was_asked = is_first || write(requests[1], "?", 1) == 1;
    if (!was_asked || read(answers[0], &answer, sizeof(answer)) != sizeof(answer)) std::exit(1);
    return answer;
  };
  const auto port = static_cast<uint16_t>(ask(true));

  const auto system = cadre::os::make_native_system();
  const auto connect = [&] {
    return cadre::TcpStore::connect(
               *system,
               {.address = {cadre::os::Address::Kind::kTcp, "127.0.0.1", port}, .token = "bench"},
               system->deadline_in(std::chrono::seconds(30)))
        .value_or_throw();
  };
  auto busy = connect();
  measure(*system, *busy);
  const int64_t bytes_alone = ask(false);
  std::vector<std::unique_ptr<cadre::TcpStore>> idle;
  for (int i = 1; i < argc; ++i) {
    const size_t wanted = std::strtoul(argv[i], nullptr, 10);
    while (idle.size() < wanted) idle.push_back(connect());
    const Latency latency = measure(*system, *busy);
    const int64_t bytes = ask(false);
    std::printf(
        "{\"idle\": %zu, \"server_bytes\": %lld, \"bytes_per_client\": %.0f, "
        "\"us_p50\": %.1f, \"us_p99\": %.1f}\n",
        idle.size(), static_cast<long long>(bytes),
        idle.empty() ? 0.0
                     : static_cast<double>(bytes - bytes_alone) / static_cast<double>(idle.size()),
        latency.us_p50, latency.us_p99);
    std::fflush(stdout);
  }
  idle.clear();
  busy.reset();
  close(requests[1]);
  waitpid(server, nullptr, 0);
  return 0;
}
