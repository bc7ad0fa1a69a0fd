#include "cadre/core/comm/tuning.h"

#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/net/tuning_file.h"
#include "cadre/core/os/files/file.h"

namespace cadre {
namespace {

Error with_remedy(const Error& error, const std::string& path) {
  return Error(error.code(),
               format("tuning file \"{}\": {}. Make it with cadre tune, or unset CADRE_TUNING_FILE "
                      "and CommunicatorOptions::tuning_file",
                      path, error.message()));
}

}  // namespace

Result<std::string> tuning_to_give(const CommunicatorOptions& options) {
  if (!options.tuning.empty()) {
    const auto parsed = parse_tuning_file(options.tuning);
    if (!parsed.ok()) return parsed.error().with_context("CommunicatorOptions::tuning");
    return to_text(*parsed);
  }
  const std::string& path = options.tuning_file;
  if (path.empty()) return std::string();
  const auto text = os::read_file(path, kMaxTuningFileBytes);
  if (!text.ok()) return with_remedy(text.error(), path);
  const auto parsed = parse_tuning_file(*text);
  if (!parsed.ok()) return with_remedy(parsed.error(), path);
  return to_text(*parsed);
}

Result<CrossoverTable> tuned_table(std::string_view given) {
  if (given.empty()) return CrossoverTable{};
  const auto parsed = parse_tuning_file(given);
  if (!parsed.ok()) return parsed.error().with_context("the tuning file of rank 0");
  return parsed->table;
}

std::string tuning_mismatch(std::string_view given, std::string_view engine,
                            std::span<const int> host_of_rank) {
  if (given.empty()) return "";
  const auto parsed = parse_tuning_file(given);
  if (!parsed.ok() || !parsed->measured) return "";
  const std::string hosts = hosts_text(host_of_rank);
  const TuningOrigin& origin = *parsed->measured;
  if (origin.engine == engine && origin.hosts == hosts) return "";
  return format(
      "the tuning file was measured with engine {} on {} (hosts x ranks) on {}, but this group has "
      "engine {} on {}: its sizes may be slower than the defaults{}; measure them with cadre tune",
      origin.engine, origin.hosts, origin.date, engine, hosts,
      engine == "host" ? ", and ranks that share memory use none of them" : "");
}

}  // namespace cadre
