#include "cadre/launch/cli/doctor/host_view.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <system_error>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/io/socket_address.h"
#include "cadre/launch/cli/doctor/background_read.h"

namespace cadre::cli {
namespace {

using os::Address;

// The limit for a name, for each folder and for the search for torch, which are read at the same
// time. An automounter or a busy host may need seconds.
constexpr Duration kReadLimit = std::chrono::seconds(5);
constexpr Duration kDistanceLimit = std::chrono::milliseconds(700);
constexpr size_t kMaxViewBytes = 4 << 20;

NameLookup look_up(const std::string& name) {
  const TimePoint begin = os::read_clocks().monotonic;
  NameLookup lookup;
  const auto addresses = os::resolve({Address::Kind::kTcp, name, 1});
  lookup.took = os::read_clocks().monotonic - begin;
  if (!addresses.ok()) {
    lookup.failure = addresses.error().message();
    return lookup;
  }
  for (const os::SocketAddress& address : *addresses) {
    std::string host = os::to_address(address).host;
    if (std::ranges::find(lookup.addresses, host) == lookup.addresses.end()) {
      lookup.addresses.push_back(std::move(host));
    }
  }
  return lookup;
}

FolderView read_folder(const std::string& name, const std::string& path) {
  std::error_code failure;
  const bool is_here = path == ".";
  FolderView view{.name = name,
                  .path = is_here ? std::filesystem::current_path(failure).string() : path};
  if (failure) {
    view.failure = cadre::format("the working folder: {}", failure.message());
    return view;
  }
  const auto space = os::read_folder_space(path);
  if (space.ok()) {
    view.space = *space;
  } else {
    view.failure = space.error().message();
  }
  return view;
}

PythonView find_python_and_torch(const os::Environment& environment) {
  PythonView view{.python = find_python(environment), .torch = find_torch(environment)};
  if (!view.torch) view.missing_torch = explain_missing_torch(environment);
  return view;
}

// What may block indefinitely. All of it is read at the same time, in threads of their own.
class SlowReads {
 public:
  SlowReads(const std::string& host_name, const os::Environment& environment,
            const std::string& run_folder)
      : name_([host_name] { return look_up(host_name); }),
        python_([environment] { return find_python_and_torch(environment); }) {
    add_folder("/dev/shm", "/dev/shm");
    if (run_folder.empty()) {
      add_folder("run folder", ".");
    } else {
      add_folder("folder", run_folder);
    }
    add_folder("TMPDIR", environment.get_or("TMPDIR", "/tmp"));
  }

  void take(HostView& view) {
    auto name = name_.take(kReadLimit);
    view.own_name = name.ok() ? *std::move(name)
                              : NameLookup{.failure = name.error().message(), .took = kReadLimit};
    view.shm = take_folder(folders_.front());
    for (size_t i = 1; i < folders_.size(); ++i) view.folders.push_back(take_folder(folders_[i]));
    auto python = python_.take(kReadLimit);
    view.python = python.ok()
                      ? *std::move(python)
                      : PythonView{.python = "unknown",
                                   .missing_torch = "The search for Python and torch failed: " +
                                                    python.error().message()};
  }

 private:
  struct Folder {
    std::string name;
    std::string path;
    BackgroundRead<FolderView> read;
  };

  void add_folder(const std::string& name, const std::string& path) {
    folders_.push_back(
        {name, path, BackgroundRead<FolderView>([name, path] { return read_folder(name, path); })});
  }
  static FolderView take_folder(Folder& folder) {
    auto view = folder.read.take(kReadLimit);
    if (view.ok()) return *std::move(view);
    return {.name = folder.name, .path = folder.path, .failure = view.error().message()};
  }

  BackgroundRead<NameLookup> name_;
  BackgroundRead<PythonView> python_;
  std::vector<Folder> folders_;
};

// The addresses are reserved for documentation (RFC 5737 and RFC 3849), so the default route leads
// there. Nothing is sent to them: only the route is looked up.
constexpr const char* kExampleIpv4 = "192.0.2.1";
constexpr const char* kExampleIpv6 = "2001:db8::1";

std::optional<os::InterfaceAddress> source_towards_example(const char* example) {
  const auto target = os::resolve({Address::Kind::kTcp, example, 1});
  if (!target.ok() || target->empty()) return std::nullopt;
  return os::source_towards(target->front());
}

void read_addresses(HostView& view) {
  view.interfaces = os::interface_addresses();
  view.source_ipv4 = source_towards_example(kExampleIpv4);
  view.source_ipv6 = source_towards_example(kExampleIpv6);
}

// Listens on loopback only, and connects to itself. A program that listens at another address is
// found in /proc/net/tcp.
PortProbe probe_port(os::System& system, uint16_t port) {
  PortProbe probe{.port = port};
  const auto listener = system.listen({Address::Kind::kTcp, "127.0.0.1", port});
  if (!listener.ok()) {
    probe.failure = listener.error().message();
    return probe;
  }
  const auto socket =
      system.connect((*listener)->address(), system.deadline_in(std::chrono::seconds(1)));
  if (!socket.ok()) probe.failure = socket.error().message();
  return probe;
}

LimitView read_limits(const std::optional<uint64_t>& inherited_descriptors) {
  LimitView limits{.descriptors = os::process_limit(RLIMIT_NOFILE),
                   .processes = os::process_limit(RLIMIT_NPROC),
                   .locked_bytes = os::process_limit(RLIMIT_MEMLOCK),
                   .core_bytes = os::process_limit(RLIMIT_CORE),
                   .address_bytes = os::process_limit(RLIMIT_AS),
                   .file_bytes = os::process_limit(RLIMIT_FSIZE)};
  if (inherited_descriptors) limits.descriptors.soft = inherited_descriptors;
  return limits;
}

std::string probe_segment(os::System& system) {
  constexpr size_t kProbeBytes = 4096;
  const auto segment = system.create_segment(kProbeBytes);
  return segment.ok() ? "" : segment.error().message();
}

// Returns why a thread cannot be started; empty if it can.
std::string probe_thread(os::System& system) {
  try {
    system.spawn("doctor", [] {})->join();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

void measure_cores(os::System& system, HostView& view) {
  const auto pairs = os::core_pairs(os::cores_of_mask(view.host.core_mask));
  view.num_core_pairs = pairs.size();
  if (!view.thread_failure.empty()) return;
  try {
    view.core_distances =
        os::measure_core_distances(system, pairs, system.deadline_in(kDistanceLimit));
  } catch (const Error& error) {
    view.thread_failure = error.message();
  }
}

}  // namespace

std::string HostView::read(std::string_view path) const {
  auto text = os::read_file(root + std::string(path), kMaxViewBytes);
  if (!text.ok()) return "";
  text->resize(text->find_last_not_of(" \t\n") + 1);
  return *std::move(text);
}

bool HostView::has_file(std::string_view path) const {
  std::error_code failure;
  return std::filesystem::exists(root + std::string(path), failure);
}

bool leads_to_peers(const os::InterfaceAddress& address) {
  return !address.is_loopback && !address.is_link_local;
}

std::string address_for_peers(const HostView& view) {
  for (const auto& source : {view.source_ipv4, view.source_ipv6}) {
    if (source && leads_to_peers(*source)) return source->host;
  }
  const auto any = std::ranges::find_if(view.interfaces, leads_to_peers);
  return any == view.interfaces.end() ? "" : any->host;
}

std::string own_address_for_peers() {
  HostView view;
  read_addresses(view);
  return address_for_peers(view);
}

HostView read_host_view(os::System& system, const os::Environment& environment,
                        const HostViewOptions& options) {
  const os::ClockReading begin = os::read_clocks();
  HostView view{.environment = environment, .host = system.host()};
  SlowReads slow(view.host.name, environment, options.run_folder);
  read_addresses(view);
  view.ports.push_back(probe_port(system, 0));
  if (options.port) view.ports.push_back(probe_port(system, *options.port));
  view.limits = read_limits(options.inherited_descriptors);
  view.segment_failure = probe_segment(system);
  view.thread_failure = probe_thread(system);
  slow.take(view);
  view.clocks.read_cost = os::measure_clock_read();
  measure_cores(system, view);
  view.clocks.sync = os::read_wall_clock_sync();
  view.clocks.jump = os::wall_clock_jump(begin, os::read_clocks());
  return view;
}

}  // namespace cadre::cli
