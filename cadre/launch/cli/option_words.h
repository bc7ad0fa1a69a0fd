// Splits a command line into options and other words, with the rules of Python's argparse.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument with a sentence that names the
// unknown option and, if there is one, a similar option. Source: argparse and torchrun:
// --nproc-per-node and --nproc_per_node are the same, values follow as the next word or after "=",
// a long option may be abbreviated if it is unambiguous, "--name=" gives an empty value, -t3 is -t
// 3, and of an option that is given twice the last one counts.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/launch/cli/command.h"

namespace cadre::cli {

// An option that a command knows.
struct OptionSpec {
  // The name with its dashes, such as "--nproc-per-node".
  std::string_view name;
  // The placeholder of the value in the help, such as "N"; empty if there is no value.
  std::string_view value;
  char letter = 0;  // the short form of the option, such as 'm' for -m
};

// An option from the command line or from an environment variable.
struct GivenOption {
  std::string_view name;  // the name of the option in its OptionSpec
  std::string spelling;   // the option as it was written: "--nproc_per_node", "-t", "PET_TEE"
  std::string value;
  bool is_switch = false;  // the option has no value

  // Returns "--nproc_per_node 4", "--standalone" or "PET_NPROC_PER_NODE=4", for the beginning of a
  // message.
  std::string text() const;
};

struct ParsedWords {
  std::vector<GivenOption> options;  // the options, in the order of the command line
  std::vector<std::string> others;

  // Returns the last option of this name; null if there is none.
  const GivenOption* find(std::string_view name) const;
};

enum class OtherWords {
  kEndTheOptions,  // the first word that is no option is a program; the rest are its arguments
  kAmongOptions,
};

// Parses `words`. The message about an unknown option names `command`, for example "cadre run". A
// word "--" ends the options and is dropped.
Result<ParsedWords> parse_words(std::string_view command, std::span<const OptionSpec> known,
                                OtherWords others, Words words);

// Parses a decimal integer; nullopt for any other text.
std::optional<int> parse_integer(std::string_view text);

}  // namespace cadre::cli
