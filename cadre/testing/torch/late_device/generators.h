// The random generators of the late devices: CPU generators, one for each device index.
//
// A kernel runs later than its call, so it draws from a generator of its own, which the call seeds
// from the generator that it names. A program with a fixed order of calls draws the same numbers in
// each run.
//
// Threads: any.
#pragma once

#include <ATen/core/Generator.h>

namespace cadre::testing::late {

// The generator that manual_seed() and operators without a generator argument use.
const at::Generator& default_generator(int device);

// Returns the generator of one kernel, whose numbers depend on the state of `generator` now, and
// advances `generator`.
at::Generator generator_of_call(at::Generator generator);

}  // namespace cadre::testing::late
