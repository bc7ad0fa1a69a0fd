#include "cadre/core/comm/preemption/preemption.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/proc/signals.h"
#include "cadre/core/wire/preemption_file.h"

namespace cadre {
namespace {

constexpr int kMaxExitCode = 255;
// How often a rank that waits for the others looks for a signal.
constexpr Duration kLookInterval = std::chrono::milliseconds(500);

std::string file_for_launcher() {
  const char* const error_file = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (error_file == nullptr || *error_file == '\0') return "";
  return std::string(error_file).append(kPreemptionFileSuffix);
}

PreemptionOptions checked(PreemptionOptions options) {
  if (options.exit_code >= 1 && options.exit_code <= kMaxExitCode) return options;
  throw Error(
      ErrorCode::kInvalidArgument,
      format("Preemption: the exit code is {}, expected 1 to {}", options.exit_code, kMaxExitCode));
}

}  // namespace

struct Preemption::Flags {
  int32_t mine = 0;
  int32_t any = 0;
};

Preemption::Preemption(PreemptionOptions options)
    : options_(checked(std::move(options))),
      file_(file_for_launcher()),
      signals_(std::make_unique<os::PendingSignal>(options_.signals)) {}

// A second copy of the signal may follow, since Slurm signals the launcher and its workers. It must
// not end a program that has finished its last step.
Preemption::~Preemption() {
  if (signals_->has_arrived()) signals_->stay();
}

bool Preemption::must_leave(Communicator& group) {
  const std::weak_ptr<const void> life = CommunicatorParts::life_of(group);
  if (life.owner_before(group_) || group_.owner_before(life)) {
    group_ = life;
    agreement_.reset();
    must_leave_ = false;
  }
  if (must_leave_) return true;
  const bool is_mine = is_requested();
  if (agreement_) {
    wait_for_agreement();
    must_leave_ = flags_->any != 0;
    if (must_leave_) return true;
  }
  auto flags = std::make_shared<Flags>(Flags{.mine = is_mine ? 1 : 0});
  agreement_ = group.all_reduce_async(
      std::as_bytes(std::span(&flags->mine, 1)), std::as_writable_bytes(std::span(&flags->any, 1)),
      DType::kInt32, ReduceOp::kMax, {.keep_alive = flags, .call = "Preemption::must_leave"});
  flags_ = std::move(flags);
  return false;
}

// A rank that waits for another one also notices a signal, so that the launcher does not take it
// for the rank that does not ask.
void Preemption::wait_for_agreement() {
  while (!agreement_->is_completed()) {
    try {
      agreement_->wait(kLookInterval);
    } catch (const Error& error) {
      // kTimeout is the end of this wait, or of the operation, which then is completed.
      if (error.code() != ErrorCode::kTimeout) throw;
      is_requested();
    }
  }
  agreement_->wait(kLookInterval);  // throws if the operation has failed
}

bool Preemption::is_requested() {
  if (!signals_->has_arrived()) return false;
  if (!std::exchange(has_told_request_, true)) tell_launcher(std::nullopt);
  return true;
}

int Preemption::leave(int64_t step) {
  signals_->stay();
  tell_launcher(step);
  return options_.exit_code;
}

void Preemption::tell_launcher(const std::optional<int64_t>& saved_step) {
  if (file_.empty()) return;
  const std::string text =
      encode_preemption_file({.saved_step = saved_step, .exit_code = options_.exit_code});
  const Status written = os::replace_file(file_, std::as_bytes(std::span(text)));
  if (written.ok()) return;
  std::fprintf(stderr, "cadre: the launcher does not learn that this rank was preempted: %s\n",
               written.error().what());
}

}  // namespace cadre
