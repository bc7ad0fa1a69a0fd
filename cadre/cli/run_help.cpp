#include <algorithm>
#include <string>
#include <string_view>

#include "cadre/base/format.h"
#include "cadre/cli/run_options.h"
#include "cadre/cli/torchrun_flags.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kRunHelp =
    R"(cadre run [options] PROGRAM [arguments...]

Starts PROGRAM several times on this host, as the ranks of one job. A file that ends in .py is run by
Python, any other is executed. Workers find torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR ...),
so programs for torchrun run unchanged.

  cadre run --nproc-per-node 4 ./train --lr 0.1     a program, four times
  cadre run --nproc-per-node auto train.py          a Python script, once per GPU, else per core
  cadre run --nproc-per-node 2 -m package.train     a Python module
  cadre run --nproc-per-node 2 --no-python ./job.py a script by its own #! line

How many
  --nproc-per-node N         workers; a number, auto, gpu or cpu (default 1)
What to run
  -m, --module               PROGRAM is a Python module
  --no-python                execute PROGRAM itself, even if it ends in .py
  --run-path                 run PROGRAM by Python, whatever its name ends with
Output
  --log-line-prefix-template TEXT
                             before each line; ${rank}, ${local_rank}, ${role_name} and ${host} are
                             replaced (default "[${rank}] ")
  --role NAME                the role's name for workers and prefixes (default "default")
When things go wrong
  --flight-records FOLDER    keep each rank's last 2,000 operations there, readable by cadre trace
                             after any end, and while it hangs
The job
  --master-port PORT         where the job's store listens, on 127.0.0.1 (default: a free port)
  --rdzv-id ID               the job's name (default: a random one)
  --shutdown-timeout SECONDS between asking workers to stop and killing them (default 30)
  --help                     this text

Options of torchrun that are accepted with the values that are true on one host
  --standalone               --rdzv-backend, --rdzv-endpoint and --master-addr are not looked at
  --nnodes N                 1 or 1:1
  --node-rank N              0
  --max-restarts N           0
  --rdzv-backend BACKEND     c10d or static
  --rdzv-endpoint HOST:PORT  a name or address of this host; the port goes before --master-port
  --master-addr HOST         the same; workers find 127.0.0.1 in MASTER_ADDR
  --local-addr HOST          a name or address of this host
  --rdzv-conf SETTINGS       the timeouts and intervals, store_type=tcp, is_host=1, rank=0
  --monitor-interval SECONDS any: the end of a worker is noticed at once
  --start-method METHOD      spawn, fork or forkserver: the same for a program
  --signals-to-handle NAMES  SIGTERM,SIGINT,SIGHUP,SIGQUIT, with or without SIGUSR1 and SIGUSR2

)";

constexpr std::string_view kEnd = R"(
All long options are understood with underscores too (--nproc_per_node). A value follows as the next
word or after "="; of an option that is given twice the last one counts. torchrun's variables are read
for torchrun's options (PET_NNODES for --nnodes, and so on); an option goes before its variable.

When a worker fails, the others are stopped, and the last thing on the screen is which one failed,
where, why, and the last 30 lines that it wrote; its exit code becomes that of cadre run (128 + N if
signal N ended it). Ctrl-C asks the workers to stop, a second Ctrl-C kills them. Ctrl-Z stops the whole
job. However cadre run ends, kill -9 included, no process of the job is left; only if both processes of
cadre run are killed with -9 in the same instant, processes that workers started are left.
Variables: PYTHON_EXEC names the Python; OMP_NUM_THREADS, if unset, becomes a fair share of the cores;
CADRE_LOG (debug, info, warning, error, off; default warning) says what the library tells on stderr.
)";

constexpr size_t kHelpWidth = 100;
constexpr std::string_view kIndent = "     ";  // and the space before each word

// Lines of whole words, indented.
std::string wrapped(std::string_view sentence) {
  std::string text;
  std::string line(kIndent);
  while (!sentence.empty()) {
    const std::string_view word = sentence.substr(0, sentence.find(' '));
    if (line.size() + 1 + word.size() > kHelpWidth) {
      text += line + "\n";
      line = kIndent;
    }
    line += cadre::format(" {}", word);
    sentence.remove_prefix(std::min(word.size() + 1, sentence.size()));
  }
  return text + line + "\n";
}

}  // namespace

std::string run_help() {
  std::string text(kRunHelp);
  text += "Options of torchrun that are refused, and what to do instead\n";
  std::string_view last_reason;
  for (const RefusedFlag& flag : refused_torchrun_flags()) {
    if (!last_reason.empty() && flag.reason != last_reason) {
      text += wrapped(last_reason);
    }
    last_reason = flag.reason;
    const std::string letter =
        flag.option.letter == 0 ? "" : cadre::format("-{}, ", flag.option.letter);
    const std::string value =
        flag.option.value.empty() ? "" : cadre::format(" {}", flag.option.value);
    text += cadre::format("  {}{}{}\n", letter, flag.option.name, value);
  }
  text += wrapped(last_reason);
  return text.append(kEnd);
}

}  // namespace cadre::cli
