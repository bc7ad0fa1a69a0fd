// A claim: the entry of a registry (registry.h) that says which agent coordinates a job, and its
// text, which is JSON.
//
// Threads: pure functions. Blocking: never. Errors: kCorruption for a text that is no claim or has
// another format version; kInvalidArgument for the claim of another job. Format:
// docs/formats/coordinator-claim.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/launch/agent/table.h"

namespace cadre::launch {

struct Claim {
  static constexpr size_t kMaxTextBytes = 8192;

  AgentId agent = 0;
  uint64_t epoch = 0;   // the agent's table has it
  uint64_t round = 0;   // the last round that the agent knows; 0: no round of the job has run
  std::string address;  // HOST:PORT at which the agent is reached

  friend bool operator==(const Claim&, const Claim&) = default;
};

// Returns whether `own` may take the place of `other`, whose agent may still be alive: if it is the
// same agent's, or if the agent of `own` knows of a later round or coordinator. A claim without a
// round never replaces that of another agent.
bool replaces(const Claim& own, const Claim& other);

std::string encode_claim(std::string_view job, const Claim& claim);
// `place` says in errors where the text was found.
Result<Claim> decode_claim(std::string_view job, std::string_view text, std::string_view place);

}  // namespace cadre::launch
