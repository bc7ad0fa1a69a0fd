// Several hosts on one machine: network namespaces joined by links, each with a host name and an
// /etc/hosts of its own, and without DNS.
//
// Threads: call from a process with no other thread. Blocking: for the time of a few commands.
// Lifetime: the destructor removes the namespaces with all that is in them.
// Errors: throws Error(kInternal) with the command that failed.
#pragma once

#include <string>
#include <vector>

namespace cadre::testing {

class Namespaces {
 public:
  // Why this process may not make namespaces; empty when it may.
  static std::string obstacle();

  explicit Namespaces(int num_hosts);
  ~Namespaces();
  Namespaces(const Namespaces&) = delete;
  Namespaces& operator=(const Namespaces&) = delete;

  struct End {
    int host = 0;
    std::string address;  // with its prefix length: "10.77.0.1/24"
  };
  // A cable between two hosts; its ends are called "to<other host>".
  void link(const End& a, const End& b);
  // `ip` with these arguments on a host.
  void ip(int host, const std::string& arguments);
  // Hosts that route for others.
  void forward(int host);

  // Moves this process to a host, which is called "node<host>" and knows the names in `hosts`,
  // lines of /etc/hosts, and no others.
  void enter(int host, const std::string& hosts = "") const;

 private:
  std::string name_of(int host) const;

  const int num_hosts_;
  std::string prefix_;
};

}  // namespace cadre::testing
