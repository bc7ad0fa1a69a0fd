// Runs the program of the ranks of a simulated job: collectives and messages that a seed picks.
// Each result is checked against its formula.
//
// Threads: see Communicator. Blocking: run_program, until every step is done or one fails. Errors:
// what the Communicator throws; kInternal for a wrong result.
#pragma once

#include <cstdint>
#include <vector>

#include "cadre/core/comm/communicator.h"
#include "step.h"

namespace cadre::testing {

struct Program {
  std::vector<Step> steps;
};

// Makes a program, which is equal on all ranks. It has at least one step of messages, some of which
// are short enough for an eager send, and one sum in symmetric memory.
Program make_program(uint64_t seed, int world_size);

// Runs the program as rank group.rank().
void run_program(Communicator& group, const Program& program);

}  // namespace cadre::testing
