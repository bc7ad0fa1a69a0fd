#include "cadre/cli/run_options.h"

namespace cadre::cli {

std::string_view run_help() {
  return R"(cadre run [options] PROGRAM [arguments...]

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
  --standalone               accepted: one host is what this launcher does
  --nnodes N, --node-rank N, --max-restarts N
                             accepted with the values 1, 0 and 0
  --help                     this text

All long options are understood with underscores too (--nproc_per_node).

When a worker fails, the others are stopped, and the last thing on the screen is which one failed,
where, why, and the last 30 lines that it wrote; its exit code becomes that of cadre run (128 + N if
signal N ended it). Ctrl-C asks the workers to stop, a second Ctrl-C kills them. Ctrl-Z stops the whole
job. However cadre run ends, kill -9 included, no process of the job is left; only if both processes of
cadre run are killed with -9 in the same instant, processes that workers started are left.
Variables: PYTHON_EXEC names the Python; OMP_NUM_THREADS, if unset, becomes a fair share of the cores;
CADRE_LOG (debug, info, warning, error, off; default warning) says what the library tells on stderr.
)";
}

}  // namespace cadre::cli
