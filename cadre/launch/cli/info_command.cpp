// `cadre info`: the properties of this build and this machine, as a table or as JSON.
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/machine.h"
#include "cadre/core/os/system.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/gpus/gpu_list.h"
#include "cadre/launch/cli/torch_finder.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kInfoCommand = "cadre info";
constexpr std::string_view kInfoHelp = R"(cadre info [--json]

Shows versions, the torch that a build would use, cores, memory, limits, NVIDIA GPUs with their PCI
Express links, and transports. Nothing is imported or started; what is absent says so. NVLink is in
none of the files that are read: nvidia-smi topo -m shows it.
)";

// One property: its JSON key, its title and its value.
struct Row {
  std::string key;
  std::string title;
  nlohmann::json value;
  std::string text;  // the value in the table
};

Row text_row(std::string key, std::string title, const std::string& text) {
  return {std::move(key), std::move(title), text, text};
}

Row number_row(std::string key, std::string title, uint64_t number) {
  return {std::move(key), std::move(title), number, cadre::format("{}", number)};
}

Row bytes_row(std::string key, std::string title, std::optional<uint64_t> bytes) {
  return {std::move(key), std::move(title), bytes ? nlohmann::json(*bytes) : nlohmann::json(),
          bytes ? readable_size(*bytes) : "no limit"};
}

std::string works(const Status& probe) {
  return probe.ok() ? "works" : "does not work: " + probe.error().message();
}

// TCP and unix sockets are both tried, because a sandbox may forbid them.
Status probe_tcp(os::System& system) {
  const auto listener = system.listen({os::Address::Kind::kTcp, "127.0.0.1", 0});
  if (!listener.ok()) return listener.error();
  const auto socket =
      system.connect((*listener)->address(), system.deadline_in(std::chrono::seconds(1)));
  return socket.ok() ? Status() : socket.error();
}

Status probe_shared_memory(os::System& system) {
  constexpr size_t kProbeBytes = 4096;
  const auto segment = system.create_segment(kProbeBytes);
  return segment.ok() ? Status() : segment.error();
}

std::vector<Row> build_rows(const os::Environment& environment) {
  std::vector<Row> rows{text_row("version", "cadre", CADRE_VERSION),
                        text_row("compiler", "compiler", cadre::format("g++ {}", __VERSION__))};
  const auto torch = find_torch(environment);
  rows.push_back(
      text_row("torch_version", "torch",
               torch ? torch->version : "not found: " + explain_missing_torch(environment)));
  if (torch) rows.push_back(text_row("torch_folder", "torch's folder", torch->folder));
  rows.push_back(text_row("python", "python", find_python(environment)));
  return rows;
}

std::vector<Row> machine_rows(const os::MachineInfo& machine) {
  const auto files = machine.max_open_files;
  const auto cores = machine.cgroup_cores;
  return {text_row("host", "host", machine.host_name),
          text_row("kernel", "kernel", machine.kernel),
          text_row("cpu", "processor", machine.cpu_model),
          number_row("num_cores", "cores", static_cast<uint64_t>(machine.num_cores)),
          number_row("num_gpus", "GPUs", static_cast<uint64_t>(machine.num_gpus)),
          bytes_row("total_memory_bytes", "memory", machine.total_memory_bytes),
          bytes_row("available_memory_bytes", "memory available", machine.available_memory_bytes),
          bytes_row("cgroup_memory_bytes", "container's memory", machine.cgroup_memory_bytes),
          {"cgroup_cores", "container's cores", cores ? nlohmann::json(*cores) : nlohmann::json(),
           cores ? cadre::format("{:.1f}", *cores) : "no limit"},
          {"max_open_files", "open files", files ? nlohmann::json(*files) : nlohmann::json(),
           files ? cadre::format("{}", *files) : "no limit"},
          bytes_row("max_locked_bytes", "locked memory", machine.max_locked_bytes)};
}

// Returns a text such as "NVIDIA H100 80GB HBM3, 0000:17:00.0, PCIe 32.0 GT/s x16, NUMA node 0".
std::string text_of(const Gpu& gpu) {
  std::string text = cadre::format("{}, {}", gpu.model, gpu.pci_id);
  if (!gpu.link_speed.empty()) {
    text += cadre::format(", PCIe {} x{}", gpu.link_speed.substr(0, gpu.link_speed.find(" PCIe")),
                          gpu.link_width);
  }
  if (gpu.numa_node) text += cadre::format(", NUMA node {}", *gpu.numa_node);
  return text;
}

// Returns a row for each GPU, and one that says what is between each pair.
std::vector<Row> gpu_rows() {
  const std::vector<Gpu> gpus = list_gpus();
  std::vector<Row> rows;
  std::map<GpuLink, std::string> pairs;
  nlohmann::json links = nlohmann::json::array();
  for (size_t i = 0; i < gpus.size(); ++i) {
    const Gpu& gpu = gpus[i];
    const nlohmann::json json = {
        {"model", gpu.model},
        {"pci_id", gpu.pci_id},
        {"uuid", gpu.uuid},
        {"link_speed", gpu.link_speed},
        {"link_width", gpu.link_width},
        {"numa_node", gpu.numa_node ? nlohmann::json(*gpu.numa_node) : nlohmann::json()}};
    rows.push_back({cadre::format("gpu_{}", gpu.index), cadre::format("GPU {}", gpu.index), json,
                    text_of(gpu)});
    for (size_t j = i + 1; j < gpus.size(); ++j) {
      const GpuLink link = link_between(gpu, gpus[j]);
      std::string& list = pairs[link];
      list += cadre::format("{}{}-{}", list.empty() ? "" : " ", gpu.index, gpus[j].index);
      links.push_back({{"gpus", {gpu.index, gpus[j].index}}, {"through", to_string(link)}});
    }
  }
  if (links.empty()) return rows;
  std::string text = has_nvswitch() ? "NVSwitch; " : "";
  for (const auto& [link, list] : pairs) {
    text += cadre::format("{}through {}: {}", text.empty() || text.ends_with("; ") ? "" : "; ",
                          to_string(link), list);
  }
  rows.push_back({"gpu_links", "pairs of GPUs", links, text});
  return rows;
}

std::vector<Row> transport_rows(os::System& system) {
  return {text_row("transport_tcp", "TCP", works(probe_tcp(system))),
          text_row("transport_shared_memory", "shared memory", works(probe_shared_memory(system)))};
}

std::string as_table(const std::vector<Row>& rows) {
  std::string text;
  for (const Row& row : rows) text += cadre::format("{:<20}{}\n", row.title, row.text);
  return text;
}

std::string as_json(const std::vector<Row>& rows) {
  nlohmann::ordered_json object;
  for (const Row& row : rows) object[row.key] = row.value;
  return object.dump(2) + "\n";
}

}  // namespace

int info_command(Words words) {
  bool wants_json = false;
  for (const std::string& word : words) {
    if (word == "--json") {
      wants_json = true;
    } else if (word == "--help" || word == "-h") {
      return print(kInfoHelp);
    } else {
      return fail(kInfoCommand, cadre::format("unknown option {}; the only option is --json", word),
                  kUsageExitCode);
    }
  }
  const os::Environment environment = os::read_environment();
  const auto system = os::make_native_system();
  std::vector<Row> rows = build_rows(environment);
  for (auto&& part :
       {machine_rows(os::read_machine_info(environment)), gpu_rows(), transport_rows(*system)}) {
    rows.insert(rows.end(), part.begin(), part.end());
  }
  return print(wants_json ? as_json(rows) : as_table(rows));
}

}  // namespace cadre::cli
