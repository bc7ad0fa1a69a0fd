// Splits a command line into options and the other words, as Python's argparse does it.
//
// Threads: pure functions. Blocking: never. Errors: kInvalidArgument with a sentence that names the
// option that is wrong and, where one is near, the right one.
// Source: argparse and torchrun: --nproc-per-node and --nproc_per_node are the same, values follow
// as the next word or after "=", a long option may be cut short while it is unambiguous, "--name="
// gives an empty value, -t3 is -t 3, and of an option that is given twice the last one counts.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/cli/command.h"

namespace cadre::cli {

// An option that a command knows.
struct OptionSpec {
  std::string_view name;   // "--nproc-per-node"
  std::string_view value;  // what the help writes for its value, "N"; empty: it takes none
  char letter = 0;         // 'm' for -m
};

// An option that was given, on the command line or by a variable of the environment.
struct GivenOption {
  std::string_view name;  // of its OptionSpec
  std::string spelling;   // as it was given: "--nproc_per_node", "-t", "PET_TEE"
  std::string value;
  bool is_switch = false;  // it takes no value

  // "--nproc_per_node 4", "--standalone" or "PET_NPROC_PER_NODE=4", to begin a sentence about it.
  std::string text() const;
};

struct ParsedWords {
  std::vector<GivenOption> options;  // in their order
  std::vector<std::string> others;

  // The last one of this name.
  const GivenOption* find(std::string_view name) const;
};

enum class OtherWords {
  kEndTheOptions,  // what follows the first of them belongs to it: a program and its arguments
  kAmongOptions,
};

// `command` is named in the sentence about an unknown option ("cadre run"). A word "--" ends the
// options and is left out.
Result<ParsedWords> parse_words(std::string_view command, std::span<const OptionSpec> known,
                                OtherWords others, Words words);

// A whole decimal number; nullopt for anything else.
std::optional<int> parse_integer(std::string_view text);

}  // namespace cadre::cli
