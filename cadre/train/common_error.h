// Errors that all ranks of a run throw alike, so that one of them may report it for all.
//
// Threads: one on each rank. Blocking: on_all_ranks() is collective, until the group's deadline.
// Lifetime: plain values. Errors: CommonError, and those of the group.
#pragma once

#include <functional>

#include "cadre/base/error.h"
#include "cadre/wrap/replica_group.h"

namespace cadre::train {

// Every rank throws it at the same place, with the same text.
class CommonError : public Error {
 public:
  explicit CommonError(const Error& error) : Error(error) {}
};

// Whether the group of ranks has failed, of which each rank may report another side.
bool is_of_group(const Error& error);

// Runs `prepare` on every rank. When it throws an Error on some of them, every rank throws the one
// of the lowest of these ranks. REQUIRES: `prepare` contains nothing collective.
void on_all_ranks(ReplicaGroup& replicas, const std::function<void()>& prepare);

}  // namespace cadre::train
