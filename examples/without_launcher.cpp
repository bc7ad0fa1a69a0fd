// Lets processes that were started without a launcher find each other through an address or a file,
// and sums their ranks. Uses only the core, without torch. Start one process for each RANK from 0
// to WORLD_SIZE - 1:
//   ./without_launcher tcp://127.0.0.1:29500 RANK WORLD_SIZE
//   ./without_launcher file:///tmp/meeting   RANK WORLD_SIZE
// On several hosts all processes need the same secret in CADRE_JOB_TOKEN.
#include <cadre/core.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <string_view>

// atoi() would return 0 for a text that is no number, and two processes would then have rank 0.
static std::optional<int> parse_number(std::string_view text) {
  int number = 0;
  const auto end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end || number < 0) return std::nullopt;
  return number;
}

static cadre::Membership meet(cadre::os::System& system, const std::string& url, cadre::Rank rank,
                              int world_size) {
  const char* secret = std::getenv("CADRE_JOB_TOKEN");
  const std::string token = secret ? secret : "";
  if (url.starts_with("file:")) {
    const auto path = cadre::parse_file_url(url).value_or_throw();
    cadre::FileRendezvous file(
        system, {.path = path, .rank = rank, .world_size = world_size, .job_token = token});
    return cadre::join_within(system, file, cadre::kDefaultConnectTimeout);
  }
  const auto address = cadre::parse_tcp_url(url).value_or_throw();
  cadre::TcpRendezvous tcp(
      system, {.address = address, .rank = rank, .world_size = world_size, .job_token = token});
  return cadre::join_within(system, tcp, cadre::kDefaultConnectTimeout);
}

int main(int argc, char** argv) try {
  if (argc != 4) {
    std::fprintf(stderr, "usage: without_launcher URL RANK WORLD_SIZE\n");
    return 2;
  }
  const auto rank = parse_number(argv[2]);
  const auto world_size = parse_number(argv[3]);
  if (!rank || !world_size || *rank >= *world_size) {
    std::fprintf(stderr,
                 "without_launcher: rank %s of %s: expected RANK from 0, below WORLD_SIZE\n",
                 argv[2], argv[3]);
    return 2;
  }
  const auto system = cadre::os::make_native_system();
  const auto membership = meet(*system, argv[1], *rank, *world_size);
  const auto group = cadre::Communicator::connect(
      *system, membership, {}, system->deadline_in(cadre::kDefaultConnectTimeout));

  int64_t sum = group->rank() + 1;
  const auto bytes = std::as_writable_bytes(std::span(&sum, 1));
  group->all_reduce(bytes, bytes, cadre::DType::kInt64, cadre::ReduceOp::kSum);
  std::printf("rank %d of %d: sum %d\n", group->rank().value, group->world_size(),
              static_cast<int>(sum));
  group->close(system->deadline_in(cadre::kDefaultCloseTimeout));
  return 0;
} catch (const cadre::Error& error) {
  std::fprintf(stderr, "without_launcher: %s\n", error.what());
  return 1;
}
