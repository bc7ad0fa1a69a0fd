#include "cadre/launch/cli/torchrun_flags.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"

namespace cadre::cli {
namespace {

constexpr std::array kRefused{
    RefusedFlag{
        {"--logs-specs", "NAME"},
        "default",
        "this launcher loads no Python plug-in; choose log files with --log-dir, --redirects and "
        "--tee"},
};

// Keys of --rdzv-conf that control how long a host waits for others. They have no effect on one
// host, so any value is accepted.
constexpr std::array<std::string_view, 8> kVacuousKeys{
    "timeout",       "read_timeout",      "join_timeout",        "last_call_timeout",
    "close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt"};

// Keys of --rdzv-conf that say how etcd is reached, with the names of torchrun's etcd and of its
// etcd-v2.
struct EtcdKey {
  std::string_view name;
  std::string EtcdOptions::*member;
};
constexpr std::array kEtcdKeys{
    EtcdKey{"protocol", &EtcdOptions::protocol},       EtcdKey{"cacert", &EtcdOptions::authorities},
    EtcdKey{"ca_cert", &EtcdOptions::authorities},     EtcdKey{"cert", &EtcdOptions::certificate},
    EtcdKey{"ssl_cert", &EtcdOptions::certificate},    EtcdKey{"key", &EtcdOptions::private_key},
    EtcdKey{"ssl_cert_key", &EtcdOptions::private_key}};

constexpr int kMaxAttempts = 1000;

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    if (comma > 0) parts.push_back(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return parts;
}

bool is_true(std::string_view value) {
  return value == "1" || value == "true" || value == "True" || value == "yes";
}

bool is_false(std::string_view value) {
  return value == "0" || value == "false" || value == "False" || value == "no";
}

bool is_true_on_one_host(std::string_view key, std::string_view value) {
  if (key == "is_host") return is_true(value);
  if (key == "store_type") return value == "tcp";
  if (key == "rank") return value == "0";
  return std::ranges::find(kVacuousKeys, key) != kVacuousKeys.end() ||
         std::ranges::find(kEtcdKeys, key, &EtcdKey::name) != kEtcdKeys.end();
}

// Requires that each setting of --rdzv-conf has a value, as torchrun does.
Status check_values(const GivenOption& given) {
  for (const std::string_view setting : split(given.value)) {
    const size_t equals = setting.find('=');
    if (equals < setting.size() - 1) continue;
    return Error(
        ErrorCode::kInvalidArgument,
        cadre::format("{}: \"{}\": expected a value, as in NAME=VALUE", given.text(), setting));
  }
  return {};
}

}  // namespace

std::span<const RefusedFlag> refused_torchrun_flags() {
  return kRefused;
}

Status check_refused_flag(const GivenOption& given) {
  const auto flag = std::ranges::find_if(
      kRefused, [&](const RefusedFlag& refused) { return refused.option.name == given.name; });
  const bool is_switch = flag->option.value.empty();
  if (!is_switch && (given.value.empty() || given.value == flag->harmless)) return {};
  return Error(ErrorCode::kInvalidArgument, cadre::format("{}: {}", given.text(), flag->reason));
}

Status check_rendezvous_settings(const GivenOption& given) {
  CADRE_RETURN_IF_ERROR(check_values(given));
  for (const std::string_view setting : split(given.value)) {
    const size_t equals = std::min(setting.find('='), setting.size());
    const std::string_view key = setting.substr(0, equals);
    if (is_true_on_one_host(key, setting.substr(std::min(equals + 1, setting.size())))) continue;
    return Error(
        ErrorCode::kInvalidArgument,
        cadre::format(
            "{}: \"{}\" is no setting of --rdzv-conf, or is one for several hosts only; this job "
            "has one host, so leave the setting out",
            given.text(), setting));
  }
  return {};
}

Status take_rendezvous_settings(const GivenOption& given, RunOptions& options) {
  launch::HostsSpec& spec = options.several;
  const auto refuse = [&](std::string_view setting, std::string_view expected) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("{}: \"{}\": expected {}", given.text(), setting, expected));
  };
  CADRE_RETURN_IF_ERROR(check_values(given));
  for (const std::string_view setting : split(given.value)) {
    const size_t equals = std::min(setting.find('='), setting.size());
    const std::string_view key = setting.substr(0, equals);
    const std::string_view value = setting.substr(std::min(equals + 1, setting.size()));
    const auto number = parse_integer(value);
    const bool is_count = number && *number >= 1;
    if (key == "join_timeout" || key == "last_call_timeout" || key == "keep_alive_interval") {
      const bool may_be_zero = key == "last_call_timeout";
      if (!is_count && !(may_be_zero && number == 0)) {
        return refuse(setting, "a whole number of seconds");
      }
      const Duration seconds = std::chrono::seconds(*number);
      (key == "join_timeout"        ? spec.join_timeout
       : key == "last_call_timeout" ? spec.last_call_timeout
                                    : spec.keep_alive_interval) = seconds;
    } else if (key == "keep_alive_max_attempt") {
      if (!is_count || *number > kMaxAttempts) return refuse(setting, "a number from 1 to 1000");
      spec.keep_alive_max_attempt = *number;
    } else if (key == "on_half") {
      if (value != "stop" && value != "continue") return refuse(setting, "stop or continue");
      spec.continues_with_half = value == "continue";
    } else if (key == "is_host") {
      spec.is_endpoint_host = is_true(value);
      if (!*spec.is_endpoint_host && !is_false(value)) return refuse(setting, "0 or 1");
    } else if (key == "store_type") {
      if (value != "tcp") return refuse(setting, "tcp, the only kind of store for several hosts");
    } else if (key == "rank") {
      return refuse(setting, "the rank of the host as --node-rank");
    } else if (const auto etcd = std::ranges::find(kEtcdKeys, key, &EtcdKey::name);
               etcd != kEtcdKeys.end()) {
      if (options.backend != RendezvousBackend::kEtcd)
        return refuse(setting, "--rdzv-backend etcd");
      if (key == "protocol" && value != "http" && value != "https") {
        return refuse(setting, "http or https");
      }
      options.etcd.*etcd->member = value;
    } else if (std::ranges::find(kVacuousKeys, key) == kVacuousKeys.end()) {
      return refuse(setting,
                    "join_timeout, last_call_timeout, keep_alive_interval, keep_alive_max_attempt, "
                    "is_host or on_half");
    }
  }
  return {};
}

Result<std::vector<int>> parse_stop_signals(const GivenOption& given) {
  using NamedSignal = std::pair<std::string_view, int>;
  constexpr std::array kSignals{NamedSignal{"SIGTERM", SIGTERM}, NamedSignal{"SIGINT", SIGINT},
                                NamedSignal{"SIGHUP", SIGHUP},   NamedSignal{"SIGQUIT", SIGQUIT},
                                NamedSignal{"SIGUSR1", SIGUSR1}, NamedSignal{"SIGUSR2", SIGUSR2}};
  std::vector<int> signals;
  for (const std::string_view name : split(given.value)) {
    const auto found = std::ranges::find(kSignals, name, &NamedSignal::first);
    if (found == kSignals.end()) {
      return Error(
          ErrorCode::kInvalidArgument,
          cadre::format("{}: \"{}\" is not among the signals that can stop a job: SIGTERM, "
                        "SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2",
                        given.text(), name));
    }
    signals.push_back(found->second);
  }
  return signals;
}

}  // namespace cadre::cli
