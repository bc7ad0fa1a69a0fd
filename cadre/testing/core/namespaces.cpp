#include "cadre/testing/core/namespaces.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/io/fd.h"

namespace cadre::testing {
namespace {

void run(const std::string& command) {
  if (std::system((command + " >/dev/null").c_str()) == 0) return;
  throw Error(ErrorCode::kInternal, format("failed: {}", command));
}

void require_call(bool succeeded, const char* what) {
  if (succeeded) return;
  throw Error(ErrorCode::kInternal, format("{}: {}", what, std::strerror(errno)));
}

// Mounts a file with this content over `target`, visible to this process only.
void cover(const std::string& target, const std::string& content) {
  std::string path = std::filesystem::temp_directory_path() / "cadre-hosts-XXXXXX";
  const os::Fd fd(::mkstemp(path.data()));
  require_call(fd.is_open(), "mkstemp");
  std::ofstream(path) << content;
  const int status = ::mount(path.c_str(), target.c_str(), nullptr, MS_BIND, nullptr);
  ::unlink(path.c_str());
  require_call(status == 0, "mount --bind");
}

}  // namespace

std::string Namespaces::obstacle() {
  const std::string name = format("cadre-probe-{}", ::getpid());
  const std::string command = format(
      "{{ ip netns add {0} && ip -n {0} link set lo up; status=$?; ip netns delete {0}; "
      "exit $status; }} >/dev/null 2>&1",
      name);
  if (std::system(command.c_str()) == 0) return "";
  return "network namespaces need root, CAP_SYS_ADMIN, the command ip (package iproute2) and a / "
         "that is a mount point, which it is not in a plain chroot";
}

Namespaces::Namespaces(int num_hosts) : num_hosts_(num_hosts) {
  // Counts the objects of this process, to make their names different: names of network namespaces
  // are shared by the whole machine.
  static int count = 0;
  prefix_ = format("cadre-{}-{}-", ::getpid(), count++);
  for (int host = 0; host < num_hosts; ++host) {
    run(format("ip netns add {}", name_of(host)));
    ip(host, "link set lo up");
  }
}

Namespaces::~Namespaces() {
  for (int host = 0; host < num_hosts_; ++host) {
    // If the constructor has failed before it made this namespace, the deletion fails, which is
    // ignored.
    const int status =
        std::system(format("ip netns delete {} >/dev/null 2>&1", name_of(host)).c_str());
    static_cast<void>(status);
  }
}

std::string Namespaces::name_of(int host) const {
  return prefix_ + std::to_string(host);
}

void Namespaces::link(const End& a, const End& b) {
  run(format("ip -n {} link add to{} type veth peer name to{} netns {}", name_of(a.host), b.host,
             a.host, name_of(b.host)));
  for (const auto& [end, other] : {std::pair(a, b), std::pair(b, a)}) {
    ip(end.host, format("address add {} dev to{} {}", end.address, other.host,
                        end.address.find(':') == std::string::npos ? "" : "nodad"));
    ip(end.host, format("link set to{} up", other.host));
  }
}

void Namespaces::ip(int host, const std::string& arguments) {
  run(format("ip -n {} {}", name_of(host), arguments));
}

void Namespaces::forward(int host) {
  run(format("ip netns exec {} sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'", name_of(host)));
}

void Namespaces::enter(int host, const std::string& hosts) const {
  const os::Fd network(
      ::open(format("/run/netns/{}", name_of(host)).c_str(), O_RDONLY | O_CLOEXEC));
  require_call(network.is_open(), "open /run/netns");
  require_call(::setns(network.get(), CLONE_NEWNET) == 0, "setns");
  require_call(::unshare(CLONE_NEWNS | CLONE_NEWUTS) == 0, "unshare");
  const std::string name = format("node{}", host);
  require_call(::sethostname(name.data(), name.size()) == 0, "sethostname");
  require_call(::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0, "mount");
  cover("/etc/hosts", "127.0.0.1 localhost\n" + hosts);
  cover("/etc/resolv.conf", "");
}

}  // namespace cadre::testing
