// Tests the encoding of the messages with which ranks exchange the lists of the tensors that they
// save.
#include "cadre/train/checkpoint/planning/save_plan.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace cadre {
namespace {

TEST(SavePlan, AnyTextThatIsNoListOfTensorsIsRefused) {
  HeldTensor held{.tensor = {.name = "w", .dtype = "F32", .shape = {2, 3}, .pieces = {}},
                  .boxes = {Box{{0, 0}, {1, 3}}, Box{{1, 0}, {1, 2}}},
                  .value = ""};
  const std::vector<HeldTensor> list = {held, held};
  const std::string text = encode_held(list);
  EXPECT_EQ(*decode_held(text), list);
  for (size_t length = 1; length < text.size(); ++length) {
    const auto cut = decode_held(std::string_view(text).substr(0, length));
    EXPECT_TRUE(!cut.ok() || cut->size() == 1) << length;
  }
}

}  // namespace
}  // namespace cadre
