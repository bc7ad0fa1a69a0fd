#include "cadre/testing/core/ranks.h"

#include <array>
#include <cstring>

#include "cadre/core/base/format.h"
#include "cadre/core/rendezvous/rendezvous.h"
#include "cadre/core/store/hash_store.h"

namespace cadre::testing {

bool RanksResult::ok() const {
  return failures().empty();
}

std::string RanksResult::failures() const {
  std::string text = failure.empty() ? "" : failure + "\n";
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].failure.empty()) continue;
    text += cadre::format("rank {}: {}\n", rank, ranks[rank].failure);
  }
  return text;
}

RanksResult run_ranks_as_threads(int world_size, const RankMain& rank_main) {
  if (world_size < 1) {
    throw Error(
        ErrorCode::kInvalidArgument,
        cadre::format("cannot run {} ranks; the number of ranks must be at least 1", world_size));
  }
  const std::unique_ptr<os::System> system = os::make_native_system();
  const os::Address rendezvous_address = make_rendezvous_address(*system);
  const auto store = std::make_shared<HashStore>(*system);
  RanksResult result;
  result.ranks.resize(static_cast<size_t>(world_size));
  std::vector<std::unique_ptr<os::Thread>> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    RankOutcome& outcome = result.ranks[static_cast<size_t>(rank)];
    threads.push_back(system->spawn(cadre::format("rank{}", rank), [&, rank] {
      RankContext context{*system, rank, world_size, rendezvous_address, {}, store};
      try {
        outcome.failure = failure_of([&] { rank_main(context); });
      } catch (...) {
        outcome.failure = "an exception that is no std::exception";
      }
      outcome.output = std::move(context.output);
    }));
  }
  for (const auto& thread : threads) thread->join();
  return result;
}

std::unique_ptr<Communicator> connect_ranks(RankContext& context,
                                            const CommunicatorOptions& options, Duration timeout) {
  CommunicatorOptions own = options;
  if (own.listen_host.empty()) own.listen_host = context.listen_host;
  return Communicator::connect(context.system,
                               {.rank = context.rank,
                                .world_size = context.world_size,
                                .store = context.world_size > 1 ? context.store : nullptr,
                                .job_token = "test"},
                               own, context.system.deadline_in(timeout));
}

CheckFailed::CheckFailed(std::string_view what)
    : std::runtime_error(cadre::format("check failed: {}", what)) {}

void require(bool condition, std::string_view what) {
  if (!condition) throw CheckFailed(what);
}

os::Address make_rendezvous_address(os::System& system) {
  std::array<std::byte, sizeof(uint64_t)> random{};
  system.random_bytes(random);
  uint64_t number = 0;
  std::memcpy(&number, random.data(), sizeof(number));
  return {os::Address::Kind::kUnix, cadre::format("cadre-test-{:016x}", number), 0};
}

std::string failure_of(const std::function<void()>& body) {
  try {
    body();
    return {};
  } catch (const Error& error) {
    return cadre::format("{}: {}", to_string(error.code()), error.message());
  } catch (const std::exception& error) {
    return cadre::format("exception: {}", error.what());
  }
}

std::string failed_fields_of(const std::function<void()>& body) {
  try {
    body();
    return {};
  } catch (const Error& error) {
    const ErrorDetails& details = error.details();
    std::string fields(to_string(error.code()));
    if (details.culprit) fields += cadre::format(" culprit={}", *details.culprit);
    if (!details.operation.empty()) fields += " operation=" + details.operation;
    if (details.operation_number) fields += cadre::format("#{}", *details.operation_number);
    return fields;
  }
}

}  // namespace cadre::testing
