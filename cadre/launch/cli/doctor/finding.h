// What `cadre doctor` has found, and its output as a table and as JSON.
//
// Threads: plain values. Blocking: never. Errors: none.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace cadre::cli {

enum class FindingState {
  kOk,
  kNote,     // works, but a program may be slower or meet a limit
  kProblem,  // jobs fail on this host, or between these hosts
};

struct Finding {
  std::string section = {};  // "names"
  std::string name = {};     // "host name"
  FindingState state = FindingState::kOk;
  std::string seen = {};     // what was read or measured
  std::string meaning = {};  // what follows from it for a job; may be empty if the state is kOk
  std::string remedy = {};   // a command for a shell; empty if there is none
  // Measured values for programs, in the JSON only. Names end in their unit.
  std::vector<std::pair<std::string, double>> numbers = {};
};

struct TableOptions {
  bool has_colour = false;
};

// Returns one line for each finding, with the meaning and the remedy of notes and problems below
// it, and a last line with the numbers of findings. Control characters are made visible.
std::string to_table(const std::vector<Finding>& findings, const TableOptions& options);

// Returns an object with the version, the findings and the numbers of notes and problems.
std::string to_json(const std::vector<Finding>& findings);

// Returns 1 if there is a problem, else 0.
int exit_code_of(const std::vector<Finding>& findings);

}  // namespace cadre::cli
