#include "cadre/core/wire/error_file.h"

#include <charconv>
#include <nlohmann/json.hpp>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

using Json = nlohmann::json;

std::string text_of(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

void read_extra(const Json& extra, ErrorFile& file) {
  file.call_stack = text_of(extra, "py_callstack");
  const std::string time = text_of(extra, "timestamp");
  std::from_chars(time.data(), time.data() + time.size(), file.timestamp_s);
  const auto details = extra.find("cadre");
  if (details == extra.end() || !details->is_object()) return;
  for (const auto& [name, value] : details->items()) {
    if (value.is_string()) file.details[name] = value.get<std::string>();
    if (value.is_number_integer()) file.details[name] = value.get<int64_t>();
  }
}

}  // namespace

std::string encode_error_file(const ErrorFile& file) {
  Json extra = {{"py_callstack", file.call_stack},
                {"timestamp", cadre::format("{}", file.timestamp_s)}};
  for (const auto& [name, value] : file.details) {
    std::visit([&, &key = name](const auto& plain) { extra["cadre"][key] = plain; }, value);
  }
  const Json root = {{"message", {{"message", file.message}, {"extraInfo", extra}}}};
  return root.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::optional<ErrorFile> parse_error_file(std::string_view text) {
  const Json root = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object() || !root.contains("message")) return std::nullopt;
  const Json& message = root["message"];
  ErrorFile file;
  if (message.is_string()) {
    file.message = message.get<std::string>();
    return file;
  }
  if (!message.is_object()) return std::nullopt;
  const auto inner = message.find("message");
  if (inner == message.end() || !inner->is_string()) return std::nullopt;
  file.message = inner->get<std::string>();
  const auto extra = message.find("extraInfo");
  if (extra != message.end() && extra->is_object()) read_extra(*extra, file);
  return file;
}

}  // namespace cadre
