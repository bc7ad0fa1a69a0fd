// Lets the operations of one thread on tensors of the CPU draw their random numbers from a
// generator of its own. All threads share libtorch's default generator, so what threads that run at
// the same time draw from it depends on timing.
//
// Threads: the object belongs to the thread that made it; other threads are not affected. Blocking:
// never. Lifetime: scopes end in reverse order. Errors: c10::Error of the operation.
// Operations of devices draw from the default generator of their device. An operation that is given
// a generator uses it.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <optional>

namespace cadre::wrap {

class OwnGenerator {
 public:
  // `make` is called when the generator is first needed.
  explicit OwnGenerator(std::function<at::Generator()> make);
  ~OwnGenerator();
  OwnGenerator(const OwnGenerator&) = delete;
  OwnGenerator& operator=(const OwnGenerator&) = delete;

  // Returns the generator of the calling thread's innermost scope; nullopt without one.
  static std::optional<at::Generator> of_thread();

 private:
  const at::Generator& generator();

  const std::function<at::Generator()> make_;
  std::optional<at::Generator> generator_;
  OwnGenerator* const outer_;
  c10::impl::IncludeDispatchKeyGuard intercepts_;
};

}  // namespace cadre::wrap
