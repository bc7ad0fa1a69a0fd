// A worker for tests that fails under cadre::record() in the way that its argument names.
#include <signal.h>
#include <sys/resource.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "cadre/core/base/error.h"
#include "cadre/core/os/proc/record/record.h"

namespace {

void write_to(volatile int* address) {
  *address = 1;
}

int recurse(volatile int* depth) {  // NOLINT(misc-no-recursion): it overflows the stack
  if (*depth < 0) return 0;
  volatile int local[64] = {};
  local[0] = *depth + 1;
  return recurse(local) + local[0];
}

[[noreturn]] void refuse() {
  throw std::runtime_error("no such layer");
}

void fail_group() {
  throw cadre::Error(cadre::ErrorCode::kPeerLost, "rank 1 is gone")
      .with_details({.culprit = cadre::Rank(1),
                     .operation = "all_reduce",
                     .operation_number = 3,
                     .group = "world"});
}

void load() {
  try {
    refuse();
  } catch (...) {  // the cause becomes a part of the outer exception
    std::throw_with_nested(std::invalid_argument("cannot load"));
  }
}

int fail(const std::string& way) {
  void (*volatile const no_function)() = nullptr;
  volatile int number = 0;
  if (way == "segv") write_to(reinterpret_cast<volatile int*>(16));
  if (way == "null-call") no_function();
  if (way == "overflow") return recurse(&number);
  if (way == "thread") {
    std::thread other([] { write_to(nullptr); });
    other.join();
  }
  if (way == "terminate") {
    std::thread other([] { refuse(); });
    other.join();
  }
  if (way == "abort") std::abort();
  if (way == "exception") refuse();
  if (way == "error") fail_group();
  if (way == "nested") load();
  if (way == "int") throw 7;
  if (way == "exit") return 5;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const rlimit no_core = {.rlim_cur = 0, .rlim_max = 0};
  ::setrlimit(RLIMIT_CORE, &no_core);
  return cadre::record([&] { return fail(argc > 1 ? argv[1] : ""); });
}
