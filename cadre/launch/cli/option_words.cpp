#include "cadre/launch/cli/option_words.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <system_error>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/base/nearest.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kNumberOfProcesses = "--nproc-per-node";
// The option of mpirun for the number of processes (-n 4 or -np 4), which gets an error message of
// its own.
constexpr std::string_view kNumberOfMpirun = "-n";

std::string with_dashes(std::string name) {
  if (name.size() > 2) std::replace(name.begin() + 2, name.end(), '_', '-');
  return name;
}

// Returns true for "--role" and "-t", but not for "-1", which is a value.
bool looks_like_an_option(std::string_view word) {
  return word.size() > 1 && word[0] == '-' && !std::isdigit(static_cast<unsigned char>(word[1]));
}

class WordParser {
 public:
  WordParser(std::string_view command, std::span<const OptionSpec> known, Words words)
      : command_(command), known_(known), words_(words) {}

  Result<ParsedWords> parse(OtherWords others) {
    while (next_ < words_.size()) {
      const std::string& word = words_[next_];
      if (word == "--" || (!looks_like_an_option(word) && others == OtherWords::kEndTheOptions)) {
        if (word == "--") ++next_;
        break;
      }
      ++next_;
      if (looks_like_an_option(word)) {
        CADRE_RETURN_IF_ERROR(word[1] == '-' ? take_long(word) : take_letter(word));
      } else {
        parsed_.others.push_back(word);
      }
    }
    parsed_.others.insert(parsed_.others.end(), words_.begin() + next_, words_.end());
    return std::move(parsed_);
  }

 private:
  Status take_long(const std::string& word) {
    const size_t equals = word.find('=');
    const std::string spelling = word.substr(0, equals);
    const std::string name = with_dashes(spelling);
    const auto named = find_long(name, spelling);
    if (!named.ok()) return named.error();
    const OptionSpec* spec = *named;
    if (equals == std::string::npos) return take(*spec, spelling, std::nullopt);
    return take(*spec, spelling, word.substr(equals + 1));
  }

  // Returns the option with this name, or the only option whose name begins with it, as argparse
  // does.
  Result<const OptionSpec*> find_long(const std::string& name, const std::string& spelling) const {
    std::vector<const OptionSpec*> longer;
    for (const OptionSpec& spec : known_) {
      if (spec.name == name) return &spec;
      if (spec.name.starts_with(name)) longer.push_back(&spec);
    }
    if (longer.empty()) return unknown(spelling);
    if (longer.size() == 1) return longer.front();
    std::string names;
    for (const OptionSpec* spec : longer) {
      names += cadre::format("{}{}", names.empty() ? "" : ", ", spec->name);
    }
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("{} is ambiguous: it may be {}", spelling, names));
  }

  // Parses a short option with or without a value: "-m", "-t 3" or "-t3".
  Status take_letter(const std::string& word) {
    const auto spec = std::ranges::find(known_, word[1], &OptionSpec::letter);
    if (spec == known_.end()) return unknown(word);
    if (word.size() == 2) return take(*spec, word, std::nullopt);
    if (spec->value.empty()) return unknown(word);
    return take(*spec, word.substr(0, 2), word.substr(2));
  }

  Status take(const OptionSpec& spec, const std::string& spelling,
              std::optional<std::string> value) {
    if (spec.value.empty() && value) {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("{}={}: {} takes no value", spelling, *value, spelling));
    }
    if (!spec.value.empty() && !value) {
      if (next_ == words_.size() || looks_like_an_option(words_[next_])) {
        return Error(ErrorCode::kInvalidArgument,
                     cadre::format("{0} needs a value: {0} {1}", spelling, spec.value));
      }
      value = words_[next_++];
    }
    parsed_.options.push_back({.name = spec.name,
                               .spelling = spelling,
                               .value = value.value_or(""),
                               .is_switch = spec.value.empty()});
    return {};
  }

  Error unknown(const std::string& spelling) const {
    std::vector<std::string> names;
    for (const OptionSpec& spec : known_) names.emplace_back(spec.name);
    if (spelling.starts_with(kNumberOfMpirun) &&
        std::ranges::count(names, kNumberOfProcesses) > 0) {
      return Error(ErrorCode::kInvalidArgument,
                   cadre::format("unknown option {}; for the number of processes use {}", spelling,
                                 kNumberOfProcesses));
    }
    const std::string near = nearest(with_dashes(spelling), names);
    return Error(ErrorCode::kInvalidArgument,
                 near.empty()
                     ? cadre::format("unknown option {}; {} --help lists all", spelling, command_)
                     : cadre::format("unknown option {}; did you mean {}?", spelling, near));
  }

  const std::string_view command_;
  const std::span<const OptionSpec> known_;
  const Words words_;
  size_t next_ = 0;
  ParsedWords parsed_;
};

}  // namespace

std::string GivenOption::text() const {
  if (!spelling.starts_with('-')) return spelling + "=" + value;
  if (is_switch) return spelling;
  return spelling + " " + (value.empty() ? "\"\"" : value);
}

const GivenOption* ParsedWords::find(std::string_view name) const {
  const auto found = std::ranges::find(options.rbegin(), options.rend(), name, &GivenOption::name);
  return found == options.rend() ? nullptr : &*found;
}

Result<ParsedWords> parse_words(std::string_view command, std::span<const OptionSpec> known,
                                OtherWords others, Words words) {
  return WordParser(command, known, words).parse(others);
}

std::optional<int> parse_integer(std::string_view text) {
  int number = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
  return number;
}

}  // namespace cadre::cli
