#include <string>
#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/run_options.h"
#include "cadre/launch/cli/torchrun_flags.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kRunHelp =
    R"(cadre run [options] PROGRAM [arguments...]

Starts PROGRAM several times, as the ranks of one job on this host or on several ones. A file that ends in .py is run by
Python, any other file is executed. Workers have torchrun's environment variables (RANK, WORLD_SIZE,
MASTER_ADDR ...), so programs for torchrun run unchanged.

  cadre run --nproc-per-node 4 ./train --lr 0.1     a program, four times
  cadre run --nproc-per-node auto train.py          a Python script, once per GPU, without GPUs per core
  cadre run --nproc-per-node 2 -m package.train     a Python module
  cadre run --nproc-per-node 2 --no-python ./job.py a script with a #! line
  cadre run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29400 --token-file FILE ./train

How many
  --nproc-per-node N         workers; a number, auto, gpu or cpu (default 1)
What to run
  --stdin RANK               this local rank reads the standard input of cadre run, for example the terminal
                             for a debugger; the others read from /dev/null
  -m, --module               PROGRAM is a Python module
  --no-python                execute PROGRAM itself, even if it ends in .py
  --run-path                 run PROGRAM by Python, even if its name does not end in .py
Output
  --log-line-prefix-template TEXT
                             the prefix of each line; ${rank}, ${local_rank}, ${role_name}, ${host}
                             and ${restart_count} are replaced (default "[${rank}] ")
  -r, --redirects STREAMS    write streams of workers to log files instead of showing them: 0 none, 1
                             standard output, 2 standard error, 3 both, or for each local rank, as in
                             0:3,1:2
  -t, --tee STREAMS          the same, but the streams are shown, too
  --log-dir FOLDER           where the job makes its folder RDZVID_xxxxxx for log files and error files
                             (default: TMPDIR); in it, attempt_0/LOCALRANK/stdout.log and stderr.log
  --local-ranks-filter RANKS show the output of these local ranks only, such as 0,2
  --duplicate-stdout-filters TEXTS
  --duplicate-stderr-filters TEXTS
                             write shown lines with one of the texts (between commas; ",," is a comma)
                             also to filtered_stdout.log or filtered_stderr.log
  --event-log-handler HANDLER
                             write events of the job as lines of JSON: null (default), console (standard
                             error) or the path of a file, with a slash
  --role NAME                the value of ROLE_NAME and ${role_name} (default "default")
Diagnosis
  --dry-run                  print the program, its arguments and the environment of each worker, and
                             start nothing
  --flight-records FOLDER    keep each rank's last 2,000 operations in FOLDER, for cadre trace, also
                             after kill -9 and while the job hangs
The job
  --strategy NAME            how a program with cadre::Training divides its model: ddp (default), zero1,
                             zero2, fsdp, hsdp, or single for one process; and degrees, such as
                             fsdp,tensor=2 (also context, pipeline); sets CADRE_STRATEGY
  --master-port PORT         the port of the job's store on 127.0.0.1 (default: a free port)
  --rdzv-id ID               the name of the job (default: a random one); etcd and file need it
  --max-restarts N           how often all workers are started again after one of them has failed
                             (default 0)
  --signals-to-handle NAMES  the signals that stop the job, among SIGTERM, SIGINT, SIGHUP, SIGQUIT,
                             SIGUSR1 and SIGUSR2 (default SIGTERM,SIGINT,SIGHUP,SIGQUIT)
  --numa-binding MODE        bind each worker to cores near its GPU, or without GPUs to its share of the
                             NUMA nodes: node, socket, exclusive (cores that no other worker has) or
                             core-complex (cores that share a cache)
  --virtual-local-rank       each worker has LOCAL_RANK=0 and sees one GPU of CUDA_VISIBLE_DEVICES
  --shutdown-timeout SECONDS time between SIGTERM and SIGKILL to the workers (default 30); less than
                             the time that a scheduler gives the job
  --help                     this text

Several hosts: start cadre run once on each, with the same options
  --nnodes N or MIN:MAX      the number of hosts (default 1); with MIN:MAX hosts may come and go
  --rdzv-backend BACKEND     c10d: the hosts meet at the endpoint, and another one takes over if that host
                             is lost; static (default): N hosts with the ranks that --node-rank gives;
                             etcd, file: the hosts find each other in etcd or in a file that they share
  --rdzv-endpoint HOST:PORT  c10d: an address of one of the hosts, the same on all (port 29400); etcd: the
                             address of etcd (port 2379); file: the path of a file or a folder
  --master-addr HOST         static: an address of the host with --node-rank 0
  --master-port PORT         static: its port (29500)
  --node-rank N              static: the rank of this host (default 0)
  --token-file FILE          the secret of the job, the same on all hosts; or variable CADRE_JOB_TOKEN
  --local-addr HOST          the address at which the others reach this host (default: found by itself)
  --rdzv-conf SETTINGS       join_timeout=600, last_call_timeout=30, keep_alive_interval=1,
                             keep_alive_max_attempt=5 (seconds and a number), on_half=stop or continue;
                             etcd: protocol=http or https, cacert, cert and key (files)

With one host these options must have values that apply to it: --nnodes 1, --node-rank 0, a name or
address of this host for --rdzv-endpoint, --master-addr and --local-addr, the timeouts of --rdzv-conf.
If srun or mpirun starts one cadre run on each host, they say what --nnodes, --node-rank and
--master-addr are. Give --nnodes 1 if these are jobs of their own.
  --standalone               --rdzv-backend, --rdzv-endpoint and --master-addr are ignored
  --monitor-interval SECONDS any value: the end of a worker is noticed at once
  --start-method METHOD      spawn, fork or forkserver, without a difference
  --use-env                  of torch.distributed.launch: LOCAL_RANK is always set

)";

constexpr std::string_view kEnd = R"(
All long options may be written with underscores (--nproc_per_node). A value follows as the next word
or after "="; if an option is given twice, the last one counts. torchrun's variables are read for
torchrun's options (PET_NNODES for --nnodes, and so on); an option takes precedence over its variable.

When a worker fails, the others are stopped, and the report at the end of the output has the rank that
failed, its host, the reason, and its last 30 lines; its exit code becomes that of cadre run (128 + N
if signal N ended it). With --max-restarts all ranks are then started again, with an empty store and
TORCHELASTIC_RESTART_COUNT one higher; if workers fail within 10 s several times in a row, after a delay
of at most 5 s. A signal that stops the job ends it without a restart.
SIGTERM, SIGUSR1 and SIGUSR2, by which schedulers announce the end of a job, reach the workers; if all
of them use cadre::Preemption and save the same step, the exit code is 75 (or another one that they
chose), which asks for another run, and no restart follows. SIGTERM also starts --shutdown-timeout.
Ctrl-C sends SIGINT to the workers, a second Ctrl-C kills them. Ctrl-Z suspends the job. After cadre run
has ended, even by kill -9, no process of the job is left; only if both processes of cadre run are
killed with -9 at the same time, processes that workers started are left.
Variables: PYTHON_EXEC is the Python interpreter; OMP_NUM_THREADS, if unset, becomes the number of
cores divided by the workers; CADRE_LOG (debug, info, warning, error, off; default warning) is the
level of the library's log on stderr.
)";

constexpr std::string_view kReasonIndent = "      ";

}  // namespace

std::string run_help() {
  std::string text(kRunHelp);
  text += "Options of torchrun that are refused, and what to do instead\n";
  std::string_view last_reason;
  for (const RefusedFlag& flag : refused_torchrun_flags()) {
    if (!last_reason.empty() && flag.reason != last_reason) {
      text += wrapped(last_reason, kReasonIndent);
    }
    last_reason = flag.reason;
    const std::string letter =
        flag.option.letter == 0 ? "" : cadre::format("-{}, ", flag.option.letter);
    const std::string value =
        flag.option.value.empty() ? "" : cadre::format(" {}", flag.option.value);
    text += cadre::format("  {}{}{}\n", letter, flag.option.name, value);
  }
  text += wrapped(last_reason, kReasonIndent);
  return text.append(kEnd);
}

}  // namespace cadre::cli
