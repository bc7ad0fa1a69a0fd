#include "verdict.h"

namespace cadre::testing {

Verdict verdict_of(const JobOutcome& outcome, int rank) {
  const ErrorDetails& details = outcome.ranks[static_cast<size_t>(rank)].failure->details();
  Verdict verdict;
  verdict.reporter = details.reporter.value_or(rank).value;
  verdict.is_connecting = outcome.ranks[static_cast<size_t>(verdict.reporter)].was_connecting();
  if (details.culprit) verdict.culprit = details.culprit->value;
  return verdict;
}

}  // namespace cadre::testing
