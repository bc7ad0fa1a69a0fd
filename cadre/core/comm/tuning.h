// The tuning file of a group: what rank 0 reads and gives to all ranks, and what the engine gets.
//
// Threads: any. Blocking: tuning_to_give(), for the time of the file system.
// Errors: those of reading and of parse_tuning_file(), with the path and the remedy.
// Decision: docs/decisions/0041-tuning.md.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/collective/net/chooser.h"
#include "cadre/core/comm/communicator_options.h"

namespace cadre {

// Returns the text that rank 0 gives to all ranks, without comments: of options.tuning, or else of
// the file options.tuning_file. Empty if the options have neither.
Result<std::string> tuning_to_give(const CommunicatorOptions& options);

// Returns the table of a text that rank 0 has given; the default table for an empty text.
Result<CrossoverTable> tuned_table(std::string_view given);

// Returns a sentence if the sizes of the text were measured on a group of another shape or engine;
// else an empty text.
std::string tuning_mismatch(std::string_view given, std::string_view engine,
                            std::span<const int> host_of_rank);

}  // namespace cadre
