// all_reduce of float32 sums through the Communicator; one JSON line for each size and kind of
// memory. Its peers, mpi_all_reduce.cpp and gloo_all_reduce.py, do the same, step by step.
//
//   cadre_all_reduce SECONDS BYTES...        place in the job: the environment (cadre run)
//
// Each operation works on input that was written anew just before, starts behind a barrier and is
// checked; the time of one operation is that of the rank that took longest.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cadre/comm/communicator.h"
#include "cadre/rendezvous/environment_rendezvous.h"

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

// Microseconds of one operation on this rank.
double time_once(Communicator& world, Bytes data) {
  auto* values = reinterpret_cast<float*>(data.data());
  const size_t count = data.size() / sizeof(float);
  const auto mine = static_cast<float>(world.rank() + 1);
  for (size_t i = 0; i < count; ++i) values[i] = mine + static_cast<float>(i % 7);
  world.barrier();
  const double start = now_us();
  world.all_reduce(data, data, DType::kFloat32, ReduceOp::kSum);
  const double end = now_us();
  const auto ranks = static_cast<float>(world.world_size());
  for (size_t i = 0; i < count; i += std::max<size_t>(1, count / 64)) {
    if (values[i] != ranks * (ranks + 1) / 2 + ranks * static_cast<float>(i % 7)) {
      throw cadre::Error(cadre::ErrorCode::kInternal, "the sum is wrong");
    }
  }
  return end - start;
}

void measure(Communicator& world, const char* memory, Bytes data, double seconds) {
  // All ranks must run equally often: rank 0 decides after a warm-up.
  const double warm_up_start = now_us();
  for (int i = 0; i < 3; ++i) time_once(world, data);
  std::vector<int64_t> runs = {
      static_cast<int64_t>(seconds * 1e6 / std::max((now_us() - warm_up_start) / 3, 1.0))};
  runs[0] = std::clamp<int64_t>(runs[0], kMinRuns, kMaxRuns);
  world.broadcast(bytes_of(runs), DType::kInt64, 0);

  const double cpu_before = cpu_seconds();
  std::vector<double> times;
  for (int64_t i = 0; i < runs[0]; ++i) times.push_back(time_once(world, data));
  std::vector<double> cpu = {cpu_seconds() - cpu_before};
  world.all_reduce(bytes_of(times), bytes_of(times), DType::kFloat64, ReduceOp::kMax);
  world.all_reduce(bytes_of(cpu), bytes_of(cpu), DType::kFloat64, ReduceOp::kSum);
  if (world.rank() != 0) return;
  std::sort(times.begin(), times.end());
  std::printf(
      "{\"bytes\": %zu, \"memory\": \"%s\", \"median_us\": %.3f, \"p99_us\": %.3f, "
      "\"runs\": %zu, \"cpu_us\": %.3f}\n",
      data.size(), memory, times[times.size() / 2], times[times.size() * 99 / 100], times.size(),
      cpu[0] * 1e6 / static_cast<double>(times.size()));
  std::fflush(stdout);
}

void run(int argc, char** argv) {
  const auto system = cadre::os::make_native_system();
  const auto deadline = system->deadline_in(cadre::kDefaultConnectTimeout);
  cadre::EnvironmentRendezvous rendezvous(*system, cadre::read_job_environment().value_or_throw());
  const cadre::Membership membership = rendezvous.join(deadline).value_or_throw();
  const auto world = Communicator::connect(*system, membership, {}, deadline);
  const double seconds = std::atof(argv[1]);
  for (int i = 2; i < argc; ++i) {
    const size_t num_bytes = std::strtoull(argv[i], nullptr, 10);
    std::vector<float> own(num_bytes / sizeof(float));
    measure(*world, "private", bytes_of(own), seconds);
    const auto shared = world->allocate_symmetric(num_bytes);
    measure(*world, "symmetric", shared->local(), seconds);
  }
  world->close(system->deadline_in(cadre::kDefaultCloseTimeout));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: cadre_all_reduce SECONDS BYTES...\n");
    return 2;
  }
  try {
    run(argc, argv);
    return 0;
  } catch (const cadre::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
