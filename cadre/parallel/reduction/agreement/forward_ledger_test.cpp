// Tests which forwards wait for a backward, and the positions in the step that ranks compare.
#include "cadre/parallel/reduction/agreement/forward_ledger.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace cadre::reduction {
namespace {

std::shared_ptr<Forward> forward_in(ForwardLedger& ledger) {
  auto forward = ledger.enter({.num_samples = 1, .is_synchronized = true});
  ledger.set_returned(forward->number);
  return forward;
}

TEST(ForwardLedger, PlacesOfForwardsThatWaitAreCountedAnewAfterAPass) {
  ForwardLedger ledger;
  std::vector<std::shared_ptr<Forward>> forwards;
  for (int i = 0; i < 3; ++i) forwards.push_back(forward_in(ledger));
  EXPECT_EQ(ledger.position(1).places, 0b111);
  EXPECT_EQ(ledger.take(forwards[0].get(), {.is_accumulated = false}).size(), 1);
  ledger.end_pass(1);
  // Three forwards ran, and a backward reduced the gradients of the first one. The second and third
  // still wait for a backward, and must have places 0 and 1 in the next step.
  const StepPosition position = ledger.position(2);
  EXPECT_EQ(position.num_older, 0);
  EXPECT_EQ(position.num_newer, 2);
  EXPECT_EQ(position.places, 0b11);
  forwards.push_back(forward_in(ledger));
  EXPECT_EQ(ledger.position(2).places, 0b111);
}

}  // namespace
}  // namespace cadre::reduction
