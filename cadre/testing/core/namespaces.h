// Simulates several hosts on one machine by network namespaces that are connected by virtual links.
// Each simulated host has its own host name and /etc/hosts, and no DNS.
//
// Threads: call it from a process with no other thread. Blocking: while a few commands run.
// Lifetime: the destructor removes the namespaces and everything in them. Errors: throws
// Error(kInternal) with the command that failed.
#pragma once

#include <string>
#include <vector>

namespace cadre::testing {

class Namespaces {
 public:
  // Returns why this process is not allowed to make network namespaces; an empty text if it is.
  static std::string obstacle();

  explicit Namespaces(int num_hosts);
  ~Namespaces();
  Namespaces(const Namespaces&) = delete;
  Namespaces& operator=(const Namespaces&) = delete;

  struct End {
    int host = 0;
    std::string address;  // includes the prefix length: "10.77.0.1/24"
  };
  // Makes a link between two hosts. The network interface on each side is called "to<other host>".
  void link(const End& a, const End& b);
  // Runs the command `ip` with these arguments for a host.
  void ip(int host, const std::string& arguments);
  // Enables IP forwarding on a host.
  void forward(int host);

  // Moves this process to a host, which is called "node<host>". The process can resolve only the
  // names in `hosts`, which has the format of /etc/hosts.
  void enter(int host, const std::string& hosts = "") const;

 private:
  std::string name_of(int host) const;

  const int num_hosts_;
  std::string prefix_;
};

}  // namespace cadre::testing
