// Simulates several hosts on one machine: network namespaces that are joined by links. Each has its
// own host name and /etc/hosts, and no DNS.
//
// Threads: call from a process with no other thread. Blocking: for the time of a few commands.
// Lifetime: the destructor removes the namespaces and everything in them. Errors: throws
// Error(kInternal) with the command that failed.
#pragma once

#include <string>
#include <vector>

namespace cadre::testing {

class Namespaces {
 public:
  // Returns why this process may not make namespaces; an empty text if it may.
  static std::string obstacle();

  explicit Namespaces(int num_hosts);
  ~Namespaces();
  Namespaces(const Namespaces&) = delete;
  Namespaces& operator=(const Namespaces&) = delete;

  struct End {
    int host = 0;
    std::string address;  // includes the prefix length: "10.77.0.1/24"
  };
  // Makes a link between two hosts; its ends are called "to<other host>".
  void link(const End& a, const End& b);
  // Runs `ip` with these arguments on a host.
  void ip(int host, const std::string& arguments);
  // Makes a host route packets for others.
  void forward(int host);

  // Moves this process to a host, which is called "node<host>". The host resolves only the names in
  // `hosts`, which has the format of /etc/hosts.
  void enter(int host, const std::string& hosts = "") const;

 private:
  std::string name_of(int host) const;

  const int num_hosts_;
  std::string prefix_;
};

}  // namespace cadre::testing
