// A scope in which a thread computes as if it were the only process of a job. Inside it every call
// on a group of several ranks throws.
//
// Threads: a scope applies to the thread that creates it and to a backward that this thread runs.
// Scopes may be nested. Blocking: never. Lifetime: `remedy` is static text. Errors: while a scope
// exists, every method of a ProcessGroup of more than one rank, rank() and world_size() included,
// throws kInvalidArgument with the remedy. So a module whose computation depends on its rank is
// detected. Without the error it would compute something else than one process does, or wait for
// ranks that do not take part.
#pragma once

#include <string_view>

namespace cadre {

class Communicator;

class WorldOfOneScope {
 public:
  explicit WorldOfOneScope(std::string_view remedy);
  ~WorldOfOneScope();
  WorldOfOneScope(const WorldOfOneScope&) = delete;
  WorldOfOneScope& operator=(const WorldOfOneScope&) = delete;

  // Throws if this thread is in a scope and the group has several ranks.
  static void check(const Communicator& group, std::string_view call);

 private:
  const WorldOfOneScope* outer_;
  std::string_view remedy_;
};

}  // namespace cadre
