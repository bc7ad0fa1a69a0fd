// The checks of names, addresses, ports and clocks.
#include <algorithm>
#include <chrono>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/rendezvous/exchange_addresses.h"
#include "cadre/launch/cli/doctor/checks.h"

namespace cadre::cli {
namespace {

using std::chrono::duration;
using std::chrono::milliseconds;

using State = FindingState;

constexpr uint16_t kTorchrunPort = 29500;

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

Finding check_own_name(const HostView& view) {
  const std::string& name = view.host.name;
  const std::string address = address_for_peers(view);
  const std::string add = cadre::format("echo '{} {}' | sudo tee -a /etc/hosts",
                                        address.empty() ? "127.0.0.1" : address, name);
  Finding finding{.section = "names", .name = "host name"};
  if (view.own_name.addresses.empty()) {
    finding.state = address.empty() ? State::kNote : State::kProblem;
    finding.seen = cadre::format("{} does not resolve: {}", name, view.own_name.failure);
    finding.meaning =
        "A job whose --master-addr is this name cannot start. gloo then listens on loopback only, "
        "unless GLOO_SOCKET_IFNAME names an interface.";
    finding.remedy = add;
    return finding;
  }
  finding.seen = cadre::format("{} resolves to {}", name, joined(view.own_name.addresses));
  if (std::ranges::all_of(view.own_name.addresses,
                          [](const std::string& host) { return is_loopback_host(host); })) {
    if (address.empty()) return finding;  // a host without a network has no other address
    finding.state = State::kNote;
    finding.meaning = cadre::format(
        "It is loopback, as in Debian's /etc/hosts. Other hosts cannot reach a program that "
        "publishes this address, as gloo does unless GLOO_SOCKET_IFNAME names an interface. Ranks "
        "of Cadre publish {} instead.",
        address);
    finding.remedy = view.own_name.addresses.front() == "127.0.1.1"
                         ? cadre::format("sudo sed -i 's/^127[.]0[.]1[.]1/{}/' /etc/hosts", address)
                         : add;
    return finding;
  }
  const bool is_own = std::ranges::any_of(view.interfaces, [&](const os::InterfaceAddress& own) {
    return std::ranges::find(view.own_name.addresses, own.host) != view.own_name.addresses.end();
  });
  if (is_own) return finding;
  finding.state = State::kProblem;
  finding.meaning =
      "No interface of this host has such an address: it belongs to another host, or a router "
      "translates it. A job whose --master-addr is this name cannot start.";
  if (!address.empty()) finding.remedy = add;
  return finding;
}

Finding check_resolver(const HostView& view) {
  constexpr Duration kSlow = milliseconds(500);
  const double took_ms = duration<double, std::milli>(view.own_name.took).count();
  Finding finding{.section = "names",
                  .name = "resolver",
                  .seen = cadre::format("answered after {:.1f} ms", took_ms),
                  .numbers = {{"lookup_ms", took_ms}}};
  if (view.own_name.took < kSlow) return finding;
  finding.state = State::kNote;
  finding.meaning =
      "Each rank resolves the name of the job's store when it starts. A name server of "
      "/etc/resolv.conf may be unreachable; a line in /etc/hosts makes the resolver unnecessary.";
  finding.remedy = cadre::format("getent ahosts {}; cat /etc/resolv.conf", view.host.name);
  return finding;
}

Finding check_interfaces(const HostView& view) {
  std::vector<std::string> texts;
  std::set<std::string> names;
  for (const os::InterfaceAddress& address : view.interfaces) {
    texts.push_back(cadre::format("{} {}", address.interface, address.host));
    if (leads_to_peers(address)) names.insert(address.interface);
  }
  Finding finding{.section = "addresses",
                  .name = "interfaces",
                  .seen = texts.empty() ? "none is up" : joined(texts)};
  if (names.empty()) {
    finding.state = State::kNote;
    finding.meaning =
        "There is loopback only: jobs on this host work, other hosts cannot reach it.";
    finding.remedy = "ip -brief address";
  } else if (names.size() > 1) {
    finding.state = State::kNote;
    finding.meaning =
        "There are several networks. Ranks of Cadre use the address from which they reach the "
        "job's store. gloo and NCCL select an interface themselves, unless these variables name "
        "one.";
    const auto source = view.source_ipv4 ? view.source_ipv4 : view.source_ipv6;
    const std::string chosen =
        source && leads_to_peers(*source) ? source->interface : *names.begin();
    finding.remedy = cadre::format("export GLOO_SOCKET_IFNAME={0} NCCL_SOCKET_IFNAME={0}", chosen);
  }
  return finding;
}

Finding check_reached_at(const HostView& view) {
  std::vector<std::string> texts;
  for (const auto& source : {view.source_ipv4, view.source_ipv6}) {
    if (source) texts.push_back(cadre::format("{} on {}", source->host, source->interface));
  }
  Finding finding{.section = "addresses", .name = "peers reach"};
  if (!texts.empty()) {
    finding.seen = joined(texts);
    return finding;
  }
  const std::string address = address_for_peers(view);
  finding.seen = address.empty() ? "127.0.0.1, from this host only"
                                 : cadre::format("{}, from its own network only", address);
  if (address.empty()) return finding;  // check_interfaces() has said so
  finding.state = State::kNote;
  finding.meaning = "There is no default route, so hosts of other networks cannot be reached.";
  finding.remedy = "ip route";
  return finding;
}

// Returns "IPv4", "IPv6", both or none: where a program listens at the port. Source: proc(5),
// net/tcp: each line has the local address and port in hexadecimal, and the state 0A for a
// listener.
std::vector<std::string> listeners_at(const HostView& view, uint16_t port) {
  constexpr std::string_view kListens = "0A";
  const std::string suffix = cadre::format(":{:04X}", port);
  std::vector<std::string> found;
  for (const auto& [file, family] : {std::pair{"tcp", "IPv4"}, std::pair{"tcp6", "IPv6"}}) {
    std::istringstream lines(view.read(cadre::format("/proc/net/{}", file)));
    bool has_listener = false;
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string number;
      std::string local;
      std::string remote;
      std::string state;
      words >> number >> local >> remote >> state;
      has_listener = has_listener || (state == kListens && local.ends_with(suffix));
    }
    if (has_listener) found.emplace_back(family);
  }
  return found;
}

std::string port_name(uint16_t port) {
  return port == 0 ? "a free port" : cadre::format("port {}", port);
}

// The ports below it are for root, or for programs with CAP_NET_BIND_SERVICE.
uint16_t first_unprivileged_port(const HostView& view) {
  constexpr uint16_t kUsual = 1024;
  std::istringstream text(view.read("/proc/sys/net/ipv4/ip_unprivileged_port_start"));
  uint16_t first = 0;
  return text >> first ? first : kUsual;
}

Finding check_port(const HostView& view, const PortProbe& probe) {
  Finding finding{.section = "ports", .name = port_name(probe.port)};
  const auto listeners =
      probe.port == 0 ? std::vector<std::string>() : listeners_at(view, probe.port);
  if (probe.failure.empty() && listeners.empty()) {
    finding.seen = "a program can listen and connect";
    return finding;
  }
  finding.state = State::kProblem;
  finding.seen = listeners.empty()
                     ? probe.failure
                     : cadre::format("a program listens there ({})", joined(listeners));
  finding.meaning = "The store of a job cannot listen at this port.";
  if (probe.port == 0) {
    finding.remedy = "sysctl net.ipv4.ip_local_port_range; ss -s";
  } else if (listeners.empty() && probe.port < first_unprivileged_port(view)) {
    finding.remedy = "sysctl net.ipv4.ip_unprivileged_port_start";
  } else {
    finding.remedy = cadre::format("sudo ss -ltnp 'sport = :{}'", probe.port);
  }
  return finding;
}

// The default port of torchrun, unless the user asks for one.
Finding check_torchrun_port(const HostView& view) {
  Finding finding{.section = "ports", .name = port_name(kTorchrunPort)};
  if (listeners_at(view, kTorchrunPort).empty()) {
    finding.seen = "no program listens there";
    return finding;
  }
  finding.state = State::kNote;
  finding.seen = "a program listens there";
  finding.meaning =
      "It is the default port of torchrun for several hosts, perhaps of another job. cadre run "
      "selects a free port unless --master-port names one.";
  finding.remedy = cadre::format("sudo ss -ltnp 'sport = :{}'", kTorchrunPort);
  return finding;
}

// Returns whether a list such as "29500-29510,40000" has the port.
bool is_in_list(const std::string& list, uint16_t port) {
  std::istringstream entries(list);
  for (std::string entry; std::getline(entries, entry, ',');) {
    std::istringstream numbers(entry);
    uint16_t first = 0;
    uint16_t last = 0;
    char dash = 0;
    if (!(numbers >> first)) continue;
    if (!(numbers >> dash >> last)) last = first;
    if (first <= port && port <= last) return true;
  }
  return false;
}

Finding check_port_range(const HostView& view) {
  constexpr uint64_t kFewPorts = 1024;
  std::istringstream text(view.read("/proc/sys/net/ipv4/ip_local_port_range"));
  uint64_t first = 0;
  uint64_t last = 0;
  Finding finding{.section = "ports", .name = "port range"};
  if (!(text >> first >> last)) {
    finding.seen = "unknown";
    return finding;
  }
  const uint64_t count = last < first ? 0 : last - first + 1;
  finding.seen = cadre::format("{} to {}", first, last);
  finding.numbers = {{"num_ports", static_cast<double>(count)}};
  if (count < kFewPorts) {
    finding.state = State::kNote;
    finding.meaning =
        cadre::format("Only {} ports serve connections and listeners without a fixed port.", count);
    finding.remedy = "sudo sysctl -w net.ipv4.ip_local_port_range='32768 60999'";
    return finding;
  }
  const std::string reserved = view.read("/proc/sys/net/ipv4/ip_local_reserved_ports");
  for (const PortProbe& probe : view.ports) {
    if (probe.port < first || probe.port > last || is_in_list(reserved, probe.port)) continue;
    finding.state = State::kNote;
    finding.meaning = cadre::format(
        "The kernel gives ports of this range to connections of any program, so port {} may be in "
        "use when a job starts. Choose a port outside, or reserve it.",
        probe.port);
    finding.remedy = cadre::format("sudo sysctl -w net.ipv4.ip_local_reserved_ports='{}{}{}'",
                                   reserved, reserved.empty() ? "" : ",", probe.port);
  }
  return finding;
}

// Returns the packet filters that files show without root's rights.
std::vector<std::string> visible_filters(const HostView& view) {
  std::vector<std::string> filters;
  if (view.read("/etc/ufw/ufw.conf").find("\nENABLED=yes") != std::string::npos ||
      view.read("/etc/ufw/ufw.conf").starts_with("ENABLED=yes")) {
    filters.emplace_back("ufw");
  }
  if (view.has_file("/run/firewalld.pid") || view.has_file("/run/firewalld")) {
    filters.emplace_back("firewalld");
  }
  if (view.read("/proc/net/ip_tables_names").find("filter") != std::string::npos) {
    filters.emplace_back("iptables");
  }
  std::istringstream modules(view.read("/proc/modules"));
  for (std::string line; std::getline(modules, line);) {
    if (line.starts_with("nf_tables ")) filters.emplace_back("nftables");
  }
  return filters;
}

Finding check_firewall(const HostView& view) {
  const std::vector<std::string> filters = visible_filters(view);
  Finding finding{.section = "ports", .name = "firewall"};
  if (filters.empty()) {
    finding.seen = "none is visible; cadre doctor --listen tests what other hosts reach";
    return finding;
  }
  finding.state = State::kNote;
  finding.seen = cadre::format("{} may filter packets", joined(filters));
  finding.meaning =
      "Ranks listen at ports that the kernel chooses, so hosts of a job must accept all TCP "
      "connections from each other. Only root may read the rules; cadre doctor --listen on one "
      "host and cadre doctor HOST:PORT on another one show whether a job can connect.";
  finding.remedy = filters.front() == "ufw" ? "sudo ufw allow from PEER_ADDRESS proto tcp"
                   : filters.front() == "firewalld"
                       ? "sudo firewall-cmd --zone=trusted --add-source=PEER_ADDRESS"
                   : filters.front() == "iptables"
                       ? "sudo iptables -I INPUT -p tcp -s PEER_ADDRESS -j ACCEPT"
                       : "sudo nft list ruleset";
  return finding;
}

Finding check_synchronization(const HostView& view) {
  Finding finding{.section = "clocks", .name = "wall clock"};
  if (!view.clocks.sync) {
    finding.state = State::kNote;
    finding.seen = "this process may not ask whether it is synchronised";
    finding.meaning =
        "If the clock is not synchronised, times in the logs of several hosts cannot be compared.";
    finding.remedy = "timedatectl";
    return finding;
  }
  const double error_ms = duration<double, std::milli>(view.clocks.sync->max_error).count();
  finding.numbers = {{"max_error_ms", error_ms}};
  if (view.clocks.sync->is_synchronized) {
    finding.seen = cadre::format("synchronised, error at most {:.0f} ms", error_ms);
    return finding;
  }
  finding.state = State::kNote;
  finding.seen = "not synchronised";
  finding.meaning =
      "Times in the logs of several hosts cannot be compared. Deadlines do not depend on the wall "
      "clock: they use the monotonic clock.";
  finding.remedy = "sudo apt-get install chrony; timedatectl";
  return finding;
}

Finding check_jump(const HostView& view) {
  constexpr Duration kTolerated = milliseconds(10);
  const double jump_ms = duration<double, std::milli>(view.clocks.jump).count();
  Finding finding{.section = "clocks",
                  .name = "clock jumps",
                  .seen = cadre::format("none ({:+.2f} ms against the monotonic clock)", jump_ms),
                  .numbers = {{"jump_ms", jump_ms}}};
  if (view.clocks.jump > -kTolerated && view.clocks.jump < kTolerated) return finding;
  finding.state = State::kNote;
  finding.seen = cadre::format("the wall clock jumped by {:+.0f} ms", jump_ms);
  finding.meaning =
      "A program sets it, or the virtual machine was paused. Times in logs jump, too; deadlines do "
      "not depend on the wall clock.";
  finding.remedy = "chronyc tracking";
  return finding;
}

Finding check_clock_source(const HostView& view) {
  constexpr Duration kSlow = std::chrono::nanoseconds(500);
  const std::string source =
      view.read("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  Finding finding{
      .section = "clocks",
      .name = "clock source",
      .seen = cadre::format("{}, {} ns for a reading", source.empty() ? "unknown" : source,
                            view.clocks.read_cost.count()),
      .numbers = {{"read_ns", static_cast<double>(view.clocks.read_cost.count())}}};
  if (view.clocks.read_cost < kSlow) return finding;
  finding.state = State::kNote;
  finding.meaning =
      "Each reading needs a system call, and every operation of a group reads the clock several "
      "times. The source tsc, or kvm-clock in a virtual machine, is ten times as fast.";
  finding.remedy = "cat /sys/devices/system/clocksource/clocksource0/available_clocksource";
  return finding;
}

}  // namespace

std::vector<Finding> check_names(const HostView& view) {
  return {check_own_name(view), check_resolver(view)};
}

std::vector<Finding> check_addresses(const HostView& view) {
  return {check_interfaces(view), check_reached_at(view)};
}

std::vector<Finding> check_ports(const HostView& view) {
  std::vector<Finding> findings;
  bool has_own_port = false;
  for (const PortProbe& probe : view.ports) {
    findings.push_back(check_port(view, probe));
    has_own_port = has_own_port || probe.port != 0;
  }
  if (!has_own_port) findings.push_back(check_torchrun_port(view));
  findings.push_back(check_port_range(view));
  findings.push_back(check_firewall(view));
  return findings;
}

std::vector<Finding> check_clocks(const HostView& view) {
  return {check_synchronization(view), check_jump(view), check_clock_source(view)};
}

}  // namespace cadre::cli
