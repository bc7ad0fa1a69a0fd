// Parses the values of the options for log files.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument with a sentence that names the
// option and what was expected. Source: torchrun; ranks of more than one digit are accepted, too.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/launch/cli/option_words.h"
#include "cadre/launch/job/output/log_spec.h"

namespace cadre::cli {

// Parses "3", or "0:1,2:3" for local ranks: 0 is no stream, 1 standard output, 2 standard error, 3
// both.
Result<launch::StreamChoice> parse_streams(const GivenOption& given);

// Parses local ranks, such as "0,2".
Result<std::vector<int>> parse_local_ranks(const GivenOption& given);

// Splits "loss,error" into texts; ",," is a comma that belongs to a text.
Result<std::vector<std::string>> parse_filters(const GivenOption& given);

// Refuses options that name a local rank which this host does not have.
Status check_local_ranks(const launch::LogSpec& logs, int num_workers);
// The same for one option, such as "--stdin".
Status check_local_rank(std::string_view option, int rank, int num_workers);

}  // namespace cadre::cli
