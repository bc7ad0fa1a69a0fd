// Measures MPI's groups with the same steps, checks and output of times as cadre_groups.cpp.
//
//   mpi_groups times NUM_GROUPS
#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

double now_us() {
  return MPI_Wtime() * 1e6;
}

void all_reduce_8_bytes(MPI_Comm group) {
  int rank = 0;
  int ranks = 0;
  MPI_Comm_rank(group, &rank);
  MPI_Comm_size(group, &ranks);
  int64_t value = rank + 1;
  MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_INT64_T, MPI_SUM, group);
  if (value != int64_t{ranks} * (ranks + 1) / 2) {
    std::fprintf(stderr, "the sum is wrong\n");
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}

// The microseconds that each group took on this rank, one number for each group.
struct Times {
  std::vector<double> create;
  std::vector<double> first_use;
  std::vector<double> second_use;
  std::vector<double> close;
};

void free_group(MPI_Comm& group, Times& times) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double closing = now_us();
  MPI_Comm_free(&group);
  times.close.push_back(now_us() - closing);
}

void add_group(Times& times, std::vector<MPI_Comm>& kept, bool keep) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = now_us();
  MPI_Comm group = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, 0, 0, &group);
  const double created = now_us();
  all_reduce_8_bytes(group);
  const double used = now_us();
  times.create.push_back(created - start);
  times.first_use.push_back(used - start);
  MPI_Barrier(group);
  const double again = now_us();
  all_reduce_8_bytes(group);
  times.second_use.push_back(now_us() - again);
  if (keep) {
    kept.push_back(group);
  } else {
    free_group(group, times);
  }
}

// Returns "median, p99" of the times of the slowest rank.
std::string summary(std::vector<double> times) {
  MPI_Allreduce(MPI_IN_PLACE, times.data(), static_cast<int>(times.size()), MPI_DOUBLE, MPI_MAX,
                MPI_COMM_WORLD);
  std::sort(times.begin(), times.end());
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "[%.3f, %.3f]", times[times.size() / 2],
                times[times.size() * 99 / 100]);
  return text.data();
}

void measure(int num_groups, bool keep) {
  Times times;
  std::vector<MPI_Comm> kept;
  add_group(times, kept, keep);  // warm-up
  times = {};
  for (int i = 0; i < num_groups; ++i) add_group(times, kept, keep);
  for (MPI_Comm& group : kept) free_group(group, times);
  const std::string create = summary(times.create);
  const std::string first_use = summary(times.first_use);
  const std::string second_use = summary(times.second_use);
  const std::string end = summary(times.close);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != 0) return;
  std::printf(
      "{\"kept\": %s, \"groups\": %d, \"create_us\": %s, \"first_use_us\": %s, "
      "\"second_use_us\": %s, \"close_us\": %s}\n",
      keep ? "true" : "false", num_groups, create.c_str(), first_use.c_str(), second_use.c_str(),
      end.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int num_groups = argc == 3 ? std::atoi(argv[2]) : 0;
  if (num_groups <= 0) {
    std::fprintf(stderr, "usage: mpi_groups times NUM_GROUPS\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  measure(num_groups, true);
  measure(num_groups, false);
  MPI_Finalize();
  return 0;
}
