#include "cadre/core/base/format.h"

#include <fmt/args.h>
#include <fmt/format.h>

#include "cadre/core/base/error.h"

namespace cadre {

std::string format_values(std::string_view pattern, std::span<const FormatValue> values) {
  fmt::dynamic_format_arg_store<fmt::format_context> store;
  for (const FormatValue& value : values) {
    std::visit([&store](const auto& v) { store.push_back(v); }, value);
  }
  try {
    return fmt::vformat(fmt::string_view(pattern.data(), pattern.size()), store);
  } catch (const fmt::format_error& e) {
    throw Error(ErrorCode::kInternal,
                std::string("bad format pattern \"") + std::string(pattern) + "\": " + e.what());
  }
}

std::string list_of(std::span<const int64_t> values) {
  std::string text;
  for (const int64_t value : values) {
    if (!text.empty()) text += ", ";
    text += std::to_string(value);
  }
  return "(" + text + ")";
}

}  // namespace cadre
