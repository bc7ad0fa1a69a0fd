// Tests Python programs under `cadre run`: scripts, modules, and unmodified PyTorch programs.
#include <fstream>

#include "cadre/launch/cli/run_options.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

class RunPython : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + "/" + name) << text;
    return folder_ + "/" + name;
  }

  cadre::testing::TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path();
};

TEST_F(RunPython, RunsAScriptByItsSuffix) {
  const auto script =
      write("hello.py", "import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\n");
  const auto result = run_cadre({"run", script, "--lr", "0.1"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.output, "[0] 0 ['--lr', '0.1']\n");
}

TEST_F(RunPython, RunsAScriptOfAnyNameWhenTold) {
  const auto script = write("job", "import sys\nprint(__name__, sys.argv[1:])\n");
  const auto result = run_cadre({"run", "--run-path", script, "--lr"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output, "[0] __main__ ['--lr']\n");
  EXPECT_EQ(run_cadre({"run", script, "--lr"}).exit_code, 126);
}

TEST_F(RunPython, RunsAModule) {
  write("hello.py", "import sys\nprint(__name__, sys.argv[1:])\n");
  const auto result = run_cadre({"run", "-m", "hello", "--lr"}, {{"PYTHONPATH", folder_}});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output, "[0] __main__ ['--lr']\n");
}

TEST_F(RunPython, ExecutesAScriptItselfWhenTold) {
  const auto script = write("job.py", "#!/bin/sh\necho shell\n");
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  EXPECT_EQ(run_cadre({"run", "--no_python", script}).output, "[0] shell\n");
}

TEST_F(RunPython, TakesTheInterpreterFromTheEnvironment) {
  const auto script = write("job.py", "");
  EXPECT_EQ(run_cadre({"run", script}, {{"PYTHON_EXEC", "echo"}}).output,
            "[0] -u " + script + "\n");
  const auto missing = run_cadre({"run", script}, {{"PYTHON_EXEC", "no-such-python"}});
  EXPECT_EQ(missing.exit_code, 127);
  EXPECT_EQ(
      missing.error,
      "cadre run: to run Python (set PYTHON_EXEC): \"no-such-python\" was not found in PATH\n");
}

TEST_F(RunPython, ShowsThePythonTracebackOnceAndTheReportRefersToIt) {
  const auto script = write("broken.py", "raise ValueError('the odd one')\n");
  const auto result = run_cadre({"run", script});
  EXPECT_EQ(result.exit_code, 1);
  const std::regex end(
      "\n\\[0\\] ValueError: the odd one\n"
      "cadre: the last [0-9]+ lines of rank 0 are shown above\n"
      "cadre: rank 0 of 1 failed");
  EXPECT_TRUE(std::regex_search(result.error, end)) << result.error;
}

#ifdef CADRE_LIBTORCH_DIR
// Returns the Python that has the torch of this build: PREFIX/bin/python3 for
// PREFIX/lib/python3.X/site-packages/torch.
std::string python_with_torch() {
  const std::string python = CADRE_LIBTORCH_DIR "/../../../../bin/python3";
  return std::filesystem::exists(python) ? python : "python3";
}

// A script of a PyTorch user. It does not use Cadre.
constexpr const char* kGlooScript = R"(
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mine = torch.arange(4) + rank
dist.all_reduce(mine)
assert mine.tolist() == [sum(i + r for r in range(size)) for i in range(4)], mine
parts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
dist.all_gather(parts, torch.tensor([rank * rank]))
assert [int(part) for part in parts] == [r * r for r in range(size)], parts
dist.barrier()
print("rank", rank, "of", size, "sum", mine.tolist())
dist.destroy_process_group()
)";

TEST_F(RunPython, RunsUnmodifiedPyTorchWithGloo) {
  const auto script = write("gloo.py", kGlooScript);
  const auto result = run_cadre({"run", "--standalone", "--nproc-per-node=2", script},
                                {{"PYTHON_EXEC", python_with_torch()}});
  EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
  EXPECT_NE(result.output.find("[0] rank 0 of 2 sum [1, 3, 5, 7]\n"), std::string::npos);
  EXPECT_NE(result.output.find("[1] rank 1 of 2 sum [1, 3, 5, 7]\n"), std::string::npos);
}

// Rank 1 kills itself in the first attempt, before the import of PyTorch, which would take seconds.
constexpr const char* kRestartedScript = R"(
import os, signal, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
mine = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(mine)
print("sum", mine.item(), "restart", os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.destroy_process_group()
)";

TEST_F(RunPython, StartsUnmodifiedPyTorchAgain) {
  const auto script = write("restarted.py", kRestartedScript);
  const auto result = run_cadre({"run", "--max-restarts=2", "--nproc-per-node=2", script},
                                {{"PYTHON_EXEC", python_with_torch()}});
  EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
  EXPECT_NE(result.output.find("[0] sum 3 restart 1\n"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("[1] sum 3 restart 1\n"), std::string::npos) << result.output;
  EXPECT_NE(result.error.find("earlier failures: rank 1: signal 9 (SIGKILL) after"),
            std::string::npos)
      << result.error;
}

TEST_F(RunPython, LeavesItsFailureAsTorchelasticReadsIt) {
  const std::string error_file = folder_ + "/error.json";
  run_cadre(shell_job(2, "test $RANK = 0 || { echo no such layer; exit 3; }; sleep 50"),
            {{"TORCHELASTIC_ERROR_FILE", error_file}});
  const auto script = write("reader.py",
                            "import sys\n"
                            "from torch.distributed.elastic.multiprocessing.errors import *\n"
                            "failure = ProcessFailure(0, 1, 3, sys.argv[1])\n"
                            "print(failure.message['message'], failure.message['errorCode'],\n"
                            "      failure.timestamp > 1700000000)\n"
                            "print(ChildFailedError('job', {0: failure}))\n");
  const auto result = run_cadre({"run", "--log-line-prefix-template=", script, error_file},
                                {{"PYTHON_EXEC", python_with_torch()}});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_TRUE(masked(result.output)
                  .starts_with("rank 1 of 2 failed with exit code 3 on HOST, pid # 3 True\n"))
      << result.output;
  EXPECT_NE(result.output.find("\n  no such layer\n"), std::string::npos) << result.output;
}

// Reads the flags from the installed torch, which may be newer than Cadre: each flag must be
// accepted, or refused with a reason.
TEST(RunOptions, KnowEveryFlagOfTorchrun) {
  std::ifstream file(CADRE_LIBTORCH_DIR "/distributed/run.py");
  const std::string source((std::istreambuf_iterator<char>(file)), {});
  ASSERT_FALSE(source.empty());
  const std::regex flag("\n        \"(--?[a-z_-]+)\",");
  int num_flags = 0;
  for (std::sregex_iterator match(source.begin(), source.end(), flag), end; match != end; ++match) {
    const std::vector<std::string> words{(*match)[1]};
    const auto options = parse_run_options(words, {});
    ASSERT_FALSE(options.ok());  // the command line names no program
    EXPECT_EQ(options.error().message().find("unknown option"), std::string::npos)
        << options.error().message();
    ++num_flags;
  }
  EXPECT_GE(num_flags, 50);
}
#endif

}  // namespace
}  // namespace cadre::cli
