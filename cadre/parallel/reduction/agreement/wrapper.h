// Identifies, in errors and log lines, the wrapper of a model and its rank.
//
// Threads: plain values. Blocking: never. Errors: none.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/core/base/types.h"

namespace cadre::reduction {

// The form of the values of a wrapper's parameters between two forwards.
enum class ParameterValues : uint8_t {
  kWhole,      // every rank has all values
  kSharded,    // each rank has shards of the trained parameters, from which they are gathered
  kUnwatched,  // the wrapper watches its parameters itself
};

struct Wrapper {
  const char* name;       // is static text such as "DistributedDataParallel"
  std::string component;  // the name in its log lines, such as "ddp"
  std::string module;     // "Net"
  int rank;
  uint32_t number = 0;  // is equal on all ranks, and different for each wrapper of a group

  // Returns "DistributedDataParallel, rank 2", with which its errors begin.
  std::string place() const;
  // Returns "DistributedDataParallel of Net, rank 2", for errors about several wrappers.
  std::string place_with_module() const;
};

}  // namespace cadre::reduction
