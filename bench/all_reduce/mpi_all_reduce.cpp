// Measures MPI's all_reduce with the same inputs, barriers, checks and output as
// cadre_all_reduce.cpp.
//
//   mpi_all_reduce SECONDS BYTES...
#include <mpi.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int64_t kMinRuns = 5;
constexpr int64_t kMaxRuns = 3000;

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

struct World {
  int rank = 0;
  int size = 1;
};

double time_once(const World& world, std::vector<float>& values) {
  const auto mine = static_cast<float>(world.rank + 1);
  const size_t count = values.size();
  for (size_t i = 0; i < count; ++i) values[i] = mine + static_cast<float>(i % 7);
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = MPI_Wtime();
  MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                MPI_COMM_WORLD);
  const double end = MPI_Wtime();
  const auto ranks = static_cast<float>(world.size);
  for (size_t i = 0; i < count; i += std::max<size_t>(1, count / 64)) {
    if (values[i] != ranks * (ranks + 1) / 2 + ranks * static_cast<float>(i % 7)) {
      std::fprintf(stderr, "the sum is wrong\n");
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
  }
  return (end - start) * 1e6;
}

void measure(const World& world, size_t num_bytes, double seconds) {
  std::vector<float> values(num_bytes / sizeof(float));
  const double warm_up_start = MPI_Wtime();
  for (int i = 0; i < 3; ++i) time_once(world, values);
  const double each = std::max((MPI_Wtime() - warm_up_start) / 3, 1e-6);
  int64_t runs = std::clamp(static_cast<int64_t>(seconds / each), kMinRuns, kMaxRuns);
  MPI_Bcast(&runs, 1, MPI_INT64_T, 0, MPI_COMM_WORLD);

  const double cpu_before = cpu_seconds();
  std::vector<double> times;
  for (int64_t i = 0; i < runs; ++i) times.push_back(time_once(world, values));
  double cpu = cpu_seconds() - cpu_before;
  MPI_Allreduce(MPI_IN_PLACE, times.data(), static_cast<int>(runs), MPI_DOUBLE, MPI_MAX,
                MPI_COMM_WORLD);
  MPI_Allreduce(MPI_IN_PLACE, &cpu, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  if (world.rank != 0) return;
  std::sort(times.begin(), times.end());
  std::printf(
      "{\"bytes\": %zu, \"dtype\": \"float32\", \"memory\": \"private\", \"median_us\": %.3f, "
      "\"p99_us\": %.3f, "
      "\"runs\": %zu, \"cpu_us\": %.3f}\n",
      num_bytes, times[times.size() / 2], times[times.size() * 99 / 100], times.size(),
      cpu * 1e6 / static_cast<double>(runs));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  World world;
  MPI_Comm_rank(MPI_COMM_WORLD, &world.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world.size);
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1.0;
  for (int i = 2; i < argc; ++i) measure(world, std::strtoull(argv[i], nullptr, 10), seconds);
  MPI_Finalize();
  return 0;
}
