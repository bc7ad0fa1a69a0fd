#include "cadre/testing/core/own_process.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "cadre/core/base/format.h"

namespace cadre::testing {

std::string run_disabled_test(const std::string& name,
                              const std::vector<std::string>& environment) {
  const std::string filter = "--gtest_filter=" + name;
  const char* arguments[] = {"test", filter.c_str(), "--gtest_also_run_disabled_tests",
                             "--gtest_brief=1", nullptr};
  std::vector<const char*> variables;
  for (const std::string& variable : environment) variables.push_back(variable.c_str());
  variables.push_back(nullptr);
  const pid_t child = ::fork();
  if (child < 0) return "fork() failed";
  if (child == 0) {
    ::alarm(60);
    ::execve("/proc/self/exe", const_cast<char* const*>(arguments),
             const_cast<char* const*>(variables.data()));
    ::_exit(127);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) return format("{} was ended by signal {}", name, WTERMSIG(status));
  if (WEXITSTATUS(status) == 0) return "";
  return format("{} ended with exit code {}", name, WEXITSTATUS(status));
}

}  // namespace cadre::testing
