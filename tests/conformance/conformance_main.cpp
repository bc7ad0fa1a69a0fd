// Runs the conformance cases (conformance.h) over shared memory, over TCP, on several hosts and
// with the engines of tests, as processes, as threads and in the simulator.
//
//   cadre_conformance [--one-in N] [--seed S] [--max-ranks R]
//
// --one-in 10 runs a tenth of the cases, which the seed chooses. Without --seed the seed is that of
// the environment variable CADRE_CASES_SEED, or 1. Prints the number of cases, and exits with 1 if
// one of them failed.
#include <cstdio>
#include <vector>

#include "conformance.h"
#include "settings.h"

int main(int argc, char** argv) {
  namespace conformance = cadre::conformance;
  conformance::Choice choice;
  if (!conformance::parse(argc, argv, choice)) {
    std::fputs("usage: cadre_conformance [--one-in N] [--seed S] [--max-ranks R]\n", stderr);
    return 2;
  }
  std::vector<conformance::Place> places;
  for (const conformance::Setting& setting : conformance::kSettings) {
    places.push_back({.name = setting.to_string(),
                      .order_of_additions = setting.order_of_additions(),
                      .run_group = [setting](int world_size, uint64_t seed,
                                             const conformance::GroupMain& group_main) {
                        return conformance::run_group(setting, world_size, seed, group_main);
                      }});
  }
  return conformance::run_conformance(places, choice);
}
