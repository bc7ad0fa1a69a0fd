// Measures groups that contain all ranks of the world: the time to create and use one, and the
// resources that many of them hold. mpi_groups.cpp and gloo_groups.py run the same steps with MPI
// and gloo.
//
//   cadre_groups [--tcp] times NUM_GROUPS        rank 0 prints one JSON line for groups that are
//                                                kept to the end, and one for groups that are
//                                                closed
//   cadre_groups [--tcp] resources NUM_GROUPS    each rank prints the name of a stage and waits for
//                                                a line on stdin, while another process counts its
//                                                resources
//
// The rank and the world size come from the environment. --tcp selects the net engine over TCP even
// on one host. A time is measured from a barrier of the world on, and is that of the slowest rank;
// results are checked.
#include <cadre/core.h>
#include <cadre/core/comm/groups/split.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace {

using cadre::Communicator;
using cadre::DType;
using cadre::ReduceOp;
using Groups = std::vector<std::unique_ptr<Communicator>>;

double now_us() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(now).count();
}

// Runs an all_reduce to which each rank contributes its rank + 1.
void all_reduce_8_bytes(Communicator& group) {
  std::array<int64_t, 1> value = {group.rank() + 1};
  const auto bytes = std::as_writable_bytes(std::span(value));
  group.all_reduce(bytes, bytes, DType::kInt64, ReduceOp::kSum);
  const int64_t ranks = group.world_size();
  if (value[0] != ranks * (ranks + 1) / 2) {
    throw cadre::Error(cadre::ErrorCode::kInternal, "the sum is wrong");
  }
}

std::unique_ptr<Communicator> make_group(Communicator& world) {
  std::vector<cadre::Rank> all;
  for (int rank = 0; rank < world.world_size(); ++rank) all.emplace_back(rank);
  return cadre::new_group(world, all, world.system().deadline_in(cadre::kDefaultConnectTimeout));
}

void close(Communicator& group) {
  group.close(group.system().deadline_in(cadre::kDefaultCloseTimeout));
}

// The microseconds that each group took on this rank, one number for each group.
struct Times {
  std::vector<double> create;      // new_group alone
  std::vector<double> first_use;   // new_group and the first all_reduce of the group
  std::vector<double> second_use;  // the second all_reduce of the group
  std::vector<double> close;
};

void add_group(Communicator& world, Times& times, Groups& kept, bool keep) {
  world.barrier();
  const double start = now_us();
  auto group = make_group(world);
  const double created = now_us();
  all_reduce_8_bytes(*group);
  const double used = now_us();
  times.create.push_back(created - start);
  times.first_use.push_back(used - start);
  group->barrier();
  const double again = now_us();
  all_reduce_8_bytes(*group);
  times.second_use.push_back(now_us() - again);
  if (keep) {
    kept.push_back(std::move(group));
    return;
  }
  world.barrier();
  const double closing = now_us();
  close(*group);
  group.reset();
  times.close.push_back(now_us() - closing);
}

// Returns "median, p99" of the times of the slowest rank.
std::string summary(Communicator& world, std::vector<double> times) {
  const auto bytes = std::as_writable_bytes(std::span(times));
  world.all_reduce(bytes, bytes, DType::kFloat64, ReduceOp::kMax);
  std::sort(times.begin(), times.end());
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "[%.3f, %.3f]", times[times.size() / 2],
                times[times.size() * 99 / 100]);
  return text.data();
}

void measure(Communicator& world, int num_groups, bool keep) {
  Times times;
  Groups kept;
  add_group(world, times, kept, keep);  // warm-up
  times = {};
  for (int i = 0; i < num_groups; ++i) add_group(world, times, kept, keep);
  for (auto& group : kept) {
    world.barrier();
    const double closing = now_us();
    close(*group);
    group.reset();
    times.close.push_back(now_us() - closing);
  }
  const std::string create = summary(world, times.create);
  const std::string first_use = summary(world, times.first_use);
  const std::string second_use = summary(world, times.second_use);
  const std::string end = summary(world, times.close);
  if (world.rank() != 0) return;
  std::printf(
      "{\"kept\": %s, \"groups\": %d, \"create_us\": %s, \"first_use_us\": %s, "
      "\"second_use_us\": %s, \"close_us\": %s}\n",
      keep ? "true" : "false", num_groups, create.c_str(), first_use.c_str(), second_use.c_str(),
      end.c_str());
}

// Prints the name of the stage and waits until another process has counted this process's
// resources.
void pause(const char* stage) {
  std::printf("%s\n", stage);
  std::fflush(stdout);
  std::string line;
  std::getline(std::cin, line);
}

void hold(Communicator& world, int num_groups) {
  all_reduce_8_bytes(world);
  pause("world");
  Groups groups;
  for (int i = 0; i < num_groups; ++i) groups.push_back(make_group(world));
  pause("idle groups");
  for (const auto& group : groups) all_reduce_8_bytes(*group);
  pause("used groups");
  for (const auto& group : groups) close(*group);
  groups.clear();
  world.barrier();
  pause("groups closed");
}

void run(cadre::TransportChoice transport, std::string_view what, int num_groups) {
  const auto system = cadre::os::make_native_system();
  if (what == "resources") pause("nothing");
  const auto world = cadre::connect_from_environment(
      *system, {.transport = transport}, system->deadline_in(cadre::kDefaultConnectTimeout));
  if (what == "resources") {
    hold(*world, num_groups);
  } else {
    measure(*world, num_groups, true);
    measure(*world, num_groups, false);
  }
  close(*world);
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_tcp = argc > 1 && std::string_view(argv[1]) == "--tcp";
  const std::vector<std::string> arguments(argv + (is_tcp ? 2 : 1), argv + argc);
  const int num_groups = arguments.size() == 2 ? std::atoi(arguments[1].c_str()) : 0;
  if (num_groups <= 0 || (arguments[0] != "times" && arguments[0] != "resources")) {
    std::fprintf(stderr, "usage: cadre_groups [--tcp] times|resources NUM_GROUPS\n");
    return 2;
  }
  try {
    run(is_tcp ? cadre::TransportChoice::kTcp : cadre::TransportChoice::kAuto, arguments[0],
        num_groups);
    return 0;
  } catch (const cadre::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
