// Measures all_reduce with SUM through the Communicator. Prints one JSON line for each size and
// kind of memory. mpi_all_reduce.cpp and gloo_all_reduce.py run the same steps for float32 with MPI
// and gloo.
//
//   cadre_all_reduce [--tcp] [--skew MS] SECONDS BYTES[:DTYPE]...
//
// The rank and the world size come from the environment that `cadre run` sets. --tcp selects the
// net engine over TCP even on one host, and skips symmetric memory. --skew makes each rank sleep
// for a random time of up to MS milliseconds before each operation, which is then timed from the
// moment at which the last rank enters it. DTYPE is float32 (default), bfloat16 or float16. Before
// each operation the input is written anew and a barrier is run; the result is checked. The time of
// an operation is that of the slowest rank.
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cadre/core/comm/communicator.h"
#include "cadre/core/rendezvous/environment_rendezvous.h"

namespace {

using cadre::Bytes;
using cadre::Communicator;
using cadre::DType;
using cadre::ReduceOp;

constexpr size_t kMinRuns = 5;
constexpr size_t kMaxRuns = 3000;

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double now_us() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(now).count();
}

template <typename T>
Bytes bytes_of(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

// Converts a small positive integer to an element of the dtype.
template <typename T>
T element_of(unsigned number, DType dtype);

template <>
float element_of<float>(unsigned number, DType) {
  return static_cast<float>(number);
}

template <>
uint16_t element_of<uint16_t>(unsigned number, DType dtype) {
  if (dtype == DType::kBfloat16) {
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(number)) >> 16);
  }
  constexpr unsigned kMantissaBits = 10;
  constexpr unsigned kBias = 15;
  const auto exponent = static_cast<unsigned>(std::bit_width(number) - 1);
  const unsigned mantissa = (number << kMantissaBits >> exponent) & ((1U << kMantissaBits) - 1);
  return static_cast<uint16_t>((kBias + exponent) << kMantissaBits | mantissa);
}

// Makes this rank enter each operation after a random delay.
class Skew {
 public:
  Skew(double max_ms, int rank)
      : max_us_(1000 * max_ms), random_(static_cast<unsigned>(rank) + 1) {}

  void sleep() {
    if (max_us_ == 0) return;
    std::uniform_real_distribution<double> late(0, max_us_);
    std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(late(random_)));
  }
  // Returns the time at which the last rank entered. All ranks of a host share the clock.
  double latest(Communicator& world, double start) const {
    if (max_us_ == 0) return start;
    std::vector<double> starts = {start};
    world.all_reduce(bytes_of(starts), bytes_of(starts), DType::kFloat64, ReduceOp::kMax);
    return starts[0];
  }

 private:
  const double max_us_;
  std::minstd_rand random_;
};

// Runs one operation and returns the microseconds that it took on this rank. Element i of rank r is
// r + 1 + i % 7.
template <typename T>
double time_once_as(Communicator& world, Bytes data, DType dtype, Skew& skew) {
  constexpr unsigned kPeriod = 7;
  const auto ranks = static_cast<unsigned>(world.world_size());
  const auto mine = static_cast<unsigned>(world.rank()) + 1;
  std::array<T, kPeriod> fresh;
  std::array<T, kPeriod> sums;
  for (unsigned i = 0; i < kPeriod; ++i) {
    fresh[i] = element_of<T>(mine + i, dtype);
    sums[i] = element_of<T>(ranks * (ranks + 1) / 2 + ranks * i, dtype);
  }
  auto* values = reinterpret_cast<T*>(data.data());
  const size_t count = data.size() / sizeof(T);
  for (size_t i = 0; i < count; ++i) values[i] = fresh[i % kPeriod];
  world.barrier();
  skew.sleep();
  const double start = now_us();
  world.all_reduce(data, data, dtype, ReduceOp::kSum);
  const double end = now_us();
  for (size_t i = 0; i < count; i += std::max<size_t>(1, count / 64)) {
    if (values[i] != sums[i % kPeriod]) {
      throw cadre::Error(cadre::ErrorCode::kInternal, "the sum is wrong");
    }
  }
  return end - skew.latest(world, start);
}

double time_once(Communicator& world, Bytes data, DType dtype, Skew& skew) {
  if (dtype == DType::kFloat32) return time_once_as<float>(world, data, dtype, skew);
  return time_once_as<uint16_t>(world, data, dtype, skew);
}

struct Size {
  size_t num_bytes = 0;
  DType dtype = DType::kFloat32;
};

// Parses "4194304" or "4194304:bfloat16".
Size parse_size(std::string_view text) {
  const size_t colon = text.find(':');
  Size size{.num_bytes = std::strtoull(std::string(text.substr(0, colon)).c_str(), nullptr, 10)};
  if (colon != std::string_view::npos) {
    const auto dtype = cadre::parse_dtype(text.substr(colon + 1));
    if (!dtype || (*dtype != DType::kFloat32 && cadre::size_of(*dtype) != 2)) {
      throw cadre::Error(cadre::ErrorCode::kInvalidArgument,
                         std::string(text) + ": expected float32, bfloat16 or float16");
    }
    size.dtype = *dtype;
  }
  return size;
}

// The settings that are common to all measurements.
struct Settings {
  cadre::TransportChoice transport = cadre::TransportChoice::kAuto;
  double skew_ms = 0;
};

void measure(Communicator& world, const char* memory, Bytes data, DType dtype, double seconds,
             const Settings& settings) {
  Skew skew(settings.skew_ms, world.rank());
  // All ranks must run the operation equally often, so rank 0 times a warm-up and determines the
  // number of repetitions for all.
  const double warm_up_start = now_us();
  for (int i = 0; i < 3; ++i) time_once(world, data, dtype, skew);
  std::vector<int64_t> runs = {
      static_cast<int64_t>(seconds * 1e6 / std::max((now_us() - warm_up_start) / 3, 1.0))};
  runs[0] = std::clamp<int64_t>(runs[0], kMinRuns, kMaxRuns);
  world.broadcast(bytes_of(runs), DType::kInt64, 0);

  const double cpu_before = cpu_seconds();
  std::vector<double> times;
  for (int64_t i = 0; i < runs[0]; ++i) times.push_back(time_once(world, data, dtype, skew));
  std::vector<double> cpu = {cpu_seconds() - cpu_before};
  world.all_reduce(bytes_of(times), bytes_of(times), DType::kFloat64, ReduceOp::kMax);
  world.all_reduce(bytes_of(cpu), bytes_of(cpu), DType::kFloat64, ReduceOp::kSum);
  if (world.rank() != 0) return;
  std::sort(times.begin(), times.end());
  std::printf(
      "{\"bytes\": %zu, \"dtype\": \"%s\", \"memory\": \"%s\", \"median_us\": %.3f, \"p99_us\": "
      "%.3f, "
      "\"runs\": %zu, \"cpu_us\": %.3f}\n",
      data.size(), std::string(cadre::to_string(dtype)).c_str(), memory, times[times.size() / 2],
      times[times.size() * 99 / 100], times.size(),
      cpu[0] * 1e6 / static_cast<double>(times.size()));
  std::fflush(stdout);
}

// `arguments` has the form SECONDS BYTES[:DTYPE]...
void run(const Settings& settings, std::span<char*> arguments) {
  const auto system = cadre::os::make_native_system();
  const auto deadline = system->deadline_in(cadre::kDefaultConnectTimeout);
  cadre::EnvironmentRendezvous rendezvous(*system, cadre::read_job_environment().value_or_throw());
  const cadre::Membership membership = rendezvous.join(deadline).value_or_throw();
  const auto world =
      Communicator::connect(*system, membership, {.transport = settings.transport}, deadline);
  const double seconds = std::atof(arguments[0]);
  for (const char* text : arguments.subspan(1)) {
    const Size size = parse_size(text);
    std::vector<std::byte> own(size.num_bytes);
    measure(*world, "private", own, size.dtype, seconds, settings);
    if (settings.transport == cadre::TransportChoice::kTcp) continue;
    const auto shared = world->allocate_symmetric(size.num_bytes);
    measure(*world, "symmetric", shared->local(), size.dtype, seconds, settings);
  }
  world->close(system->deadline_in(cadre::kDefaultCloseTimeout));
}

}  // namespace

int main(int argc, char** argv) {
  std::span<char*> arguments(argv + 1, argv + argc);
  Settings settings;
  while (!arguments.empty() && std::string_view(arguments[0]).starts_with("--")) {
    const std::string_view option = arguments[0];
    const bool has_value = option == "--skew" && arguments.size() > 1;
    if (option == "--tcp") settings.transport = cadre::TransportChoice::kTcp;
    if (has_value) settings.skew_ms = std::atof(arguments[1]);
    if (option != "--tcp" && !has_value) arguments = {};
    arguments = arguments.subspan(std::min<size_t>(arguments.size(), has_value ? 2 : 1));
  }
  if (arguments.size() < 2) {
    std::fprintf(stderr, "usage: cadre_all_reduce [--tcp] [--skew MS] SECONDS BYTES[:DTYPE]...\n");
    return 2;
  }
  try {
    run(settings, arguments);
    return 0;
  } catch (const cadre::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
