#include "conformance.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/core/collective/reduction_table.h"
#include "cases.h"

namespace cadre::conformance {
namespace {

using testing::require;

// Returns the cases that this run tests. They are the same in every setting, so that the resulting
// bits can be compared.
std::vector<Case> chosen_cases(int world_size, const Choice& choice) {
  Random random(choice.seed * 100 + static_cast<uint64_t>(world_size));
  std::vector<Case> chosen;
  for (const Case& c : cases_for(world_size)) {
    if (random.below(choice.one_in) == 0) chosen.push_back(c);
  }
  return chosen;
}

// Computes FNV-1a.
uint64_t digest_of(const std::vector<std::byte>& bytes) {
  uint64_t digest = 0xcbf29ce484222325ULL;
  for (const std::byte byte : bytes) {
    digest = (digest ^ static_cast<uint64_t>(byte)) * 0x100000001b3ULL;
  }
  return digest;
}

void expect_refusal(const Tested& tested, const Case& c, std::string_view reason) {
  const Brought nothing = [&](uint64_t count) {
    return std::vector<std::byte>(count * size_of(c.dtype));
  };
  const std::string said =
      testing::failure_of([&] { collectives()[c.collective].run(tested, c, nothing); });
  require(said.starts_with("kInvalidArgument: ") && said.find(reason) != std::string::npos,
          format("{} was not refused with \"{}\", but: {}", c.to_string(), reason, said));
}

// Runs one case. Returns a digest of the result for random floats; 0 if the case must give an
// error.
uint64_t run_case(const Place& place, const Tested& tested, const Case& c) {
  const CollectiveEntry& entry = collectives()[c.collective];
  if (entry.has_op) {
    const Status rule = check_reduction(c.dtype, c.op);
    if (!rule.ok()) {
      expect_refusal(tested, c, ": " + rule.error().message());
      return 0;
    }
    if (place.refuses != nullptr && place.refuses(c.dtype, c.op)) {
      expect_refusal(tested, c, format("does not compute {} of {}", c.op, c.dtype));
      return 0;
    }
  }
  const Rank rank = tested.group.rank();
  const int world_size = tested.group.world_size();
  const auto by_formula = [&](uint64_t count) { return numbers(c, rank, world_size, 0, count); };
  require(entry.run(tested, c, by_formula) == entry.expected(c, rank, world_size),
          c.to_string() + ": not what the formula says");
  const auto at_random = [&](uint64_t count) { return noise(c, rank, count); };
  const auto first = entry.run(tested, c, at_random);
  require(entry.run(tested, c, at_random) == first,
          c.to_string() + ": a second run gives other bits");
  return digest_of(first);
}

std::string run_cases(const Place& place, Communicator& group, const std::vector<Case>& cases) {
  const Tested tested{group, place.run_call};
  std::string digests;
  for (const Case& c : cases) {
    const uint64_t digest = run_case(place, tested, c);
    digests.append(reinterpret_cast<const char*>(&digest), sizeof(digest));
  }
  return digests;
}

uint64_t digest_at(const std::string& digests, size_t index) {
  uint64_t digest = 0;
  std::memcpy(&digest, digests.data() + index * sizeof(digest), sizeof(digest));
  return digest;
}

// The digests of all ranks from the first setting that ran. The key is a pair: the order of
// additions and the world size.
using KnownBits = std::map<std::pair<int, int>, std::vector<std::string>>;

// Returns a text that names the cases whose bits are wrong; an empty text if there are none.
std::string compare_bits(const std::vector<Case>& cases, const testing::RanksResult& result,
                         std::vector<std::string>& known) {
  std::vector<std::string> digests;
  for (const auto& rank : result.ranks) digests.push_back(rank.output);
  if (known.empty()) known = digests;
  for (size_t i = 0; i < cases.size(); ++i) {
    for (size_t rank = 0; rank < digests.size(); ++rank) {
      const uint64_t digest = digest_at(digests[rank], i);
      if (digest != digest_at(known[rank], i)) {
        return format("{}: rank {} has other bits than where the ranks ran first",
                      cases[i].to_string(), rank);
      }
      const bool is_same = collectives()[cases[i].collective].is_same_everywhere;
      if (is_same && digest != digest_at(digests[0], i)) {
        return format("{}: rank {} has other bits than rank 0", cases[i].to_string(), rank);
      }
    }
  }
  return "";
}

}  // namespace

int run_conformance(std::span<const Place> places, const Choice& choice) {
  const auto system = os::make_native_system();
  KnownBits known;
  uint64_t num_cases = 0;
  uint64_t num_wrong = 0;
  for (const Place& place : places) {
    for (int world_size = 1; world_size <= choice.max_ranks; ++world_size) {
      const std::vector<Case> cases = chosen_cases(world_size, choice);
      const TimePoint start = system->now();
      const auto result = place.run_group(world_size, choice.seed, [&](Communicator& group) {
        return run_cases(place, group, cases);
      });
      const double seconds = std::chrono::duration<double>(system->now() - start).count();
      std::string wrong = result.failures();
      if (wrong.empty()) {
        wrong = compare_bits(cases, result, known[{place.order_of_additions, world_size}]);
      }
      num_cases += cases.size();
      if (!wrong.empty()) ++num_wrong;
      const std::string line =
          format("{:<28} {} ranks {:>5} cases {:>6.1f} s  {}\n", place.name, world_size,
                 cases.size(), seconds, wrong.empty() ? "right" : wrong);
      std::fputs(line.c_str(), stdout);
      std::fflush(stdout);
    }
  }
  const std::string end =
      format("{} cases (one in {}, seed {}): {}\n", num_cases, choice.one_in, choice.seed,
             num_wrong == 0 ? "all right" : format("{} groups went wrong", num_wrong));
  std::fputs(end.c_str(), stdout);
  return num_wrong == 0 ? 0 : 1;
}

bool parse(int argc, char** argv, Choice& choice) {
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc) return false;
    const std::string_view flag = argv[i];
    char* end = nullptr;
    const uint64_t number = std::strtoull(argv[i + 1], &end, 10);
    if (*end != '\0' || number == 0) return false;
    if (flag == "--one-in") {
      choice.one_in = number;
    } else if (flag == "--seed") {
      choice.seed = number;
    } else if (flag == "--max-ranks" && number <= 9) {
      choice.max_ranks = static_cast<int>(number);
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace cadre::conformance
