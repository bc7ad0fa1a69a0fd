#include "cadre/core/os/proc/record/crash_handler.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#include <unwind.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string_view>
#include <utility>

#include "cadre/core/os/proc/record/exception_file.h"
#include "cadre/core/wire/crash_file.h"

// The handler calls async-signal-safe functions only. The unwinder is such a function here: libgcc
// finds the tables of a program counter without a lock (_dl_find_object, glibc 2.35 and gcc 12).
namespace cadre::os {
namespace {

constexpr std::array kCrashSignals{SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr size_t kSignalStackBytes = 256 << 10;

// The state that the signal handlers need. It is allocated before a crash, because a signal handler
// may not allocate memory.
struct CrashState {
  std::string error_file;
  std::string crash_file;  // if empty, no crash file is written
  int process = 0;
  std::terminate_handler previous_terminate = nullptr;
  std::atomic<int> crashed_thread = 0;
  char* maps = nullptr;  // a buffer of kMaxMapsBytes; its pages are not used before a crash
};

// A signal handler gets no argument from the program, so its state is in a static variable.
constinit std::atomic<CrashState*> crash_state = nullptr;

// Builds lines of text in a buffer of fixed size, without allocations. Text that does not fit is
// dropped.
class SafeText {
 public:
  SafeText& operator<<(std::string_view text) {
    const size_t count = std::min(text.size(), buffer_.size() - size_);
    text.copy(buffer_.data() + size_, count);
    size_ += count;
    return *this;
  }
  SafeText& operator<<(int64_t number) { return add(number, 10); }
  SafeText& hex(uint64_t number) {
    *this << "0x";
    return add(number, 16);
  }
  void write_to(int file) const {
    for (size_t done = 0; done < size_;) {
      const ssize_t count = ::write(file, buffer_.data() + done, size_ - done);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return;
      done += static_cast<size_t>(count);
    }
  }

 private:
  template <typename Number>
  SafeText& add(Number number, int base) {
    std::array<char, 24> digits{};
    const auto result = std::to_chars(digits.data(), digits.data() + digits.size(), number, base);
    return *this << std::string_view(digits.data(), result.ptr);
  }

  std::array<char, 1024> buffer_;
  size_t size_ = 0;
};

std::string_view name_of_crash(int signal) {
  switch (signal) {
    case SIGSEGV:
      return "SIGSEGV";
    case SIGBUS:
      return "SIGBUS";
    case SIGFPE:
      return "SIGFPE";
    case SIGILL:
      return "SIGILL";
    default:
      return "SIGABRT";
  }
}

std::string_view read_maps(char* buffer) {
  const int file = ::open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  size_t size = 0;
  while (size < kMaxMapsBytes) {
    const ssize_t count = ::read(file, buffer + size, kMaxMapsBytes - size);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    size += static_cast<size_t>(count);
  }
  ::close(file);
  const std::string_view maps(buffer, size);
  return maps.substr(0, maps.rfind('\n') + 1);
}

void write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(file, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    text.remove_prefix(static_cast<size_t>(count));
  }
}

// Writes each stack frame as soon as it is found: if the stack is damaged, the unwinder may crash,
// too, and the kernel then ends the process at once, because all signals are blocked.
struct FrameWriter {
  int file = -1;
  std::string_view maps;
  bool is_for_reader =
      false;           // also writes the names of the files, for people who read standard error
  uint64_t begin = 0;  // the frames before this address belong to the handler and are skipped
  bool has_begun = false;
  size_t num_frames = 0;

  void write(uint64_t address, bool is_exact) {
    SafeText line;
    if (is_for_reader) {
      const auto code = find_mapped_code(maps, is_exact ? address : address - 1);
      line << "  #" << static_cast<int64_t>(num_frames) << " ";
      if (code) {
        (line << code->path << "+").hex(code->offset) << "\n";
      } else {
        line.hex(address) << "\n";
      }
    } else {
      (line << (is_exact ? "exact " : "call ")).hex(address) << "\n";
    }
    line.write_to(file);
    ++num_frames;
  }
};

_Unwind_Reason_Code on_frame(_Unwind_Context* context, void* argument) {
  auto& writer = *static_cast<FrameWriter*>(argument);
  int is_exact = 0;
  const uint64_t address = _Unwind_GetIPInfo(context, &is_exact);
  writer.has_begun = writer.has_begun || address == writer.begin;
  if (!writer.has_begun) return _URC_NO_REASON;
  if (address == 0 || writer.num_frames >= kMaxCrashFrames) return _URC_END_OF_STACK;
  // Only the first frame can have the exact address of an instruction; the addresses of all other
  // frames are return addresses.
  writer.write(address, is_exact != 0 && writer.num_frames == 0);
  return _URC_NO_REASON;
}

bool read_word(uint64_t address, uint64_t& word) {
  const iovec to = {.iov_base = &word, .iov_len = sizeof(word)};
  const iovec from = {.iov_base = reinterpret_cast<void*>(address), .iov_len = sizeof(word)};
  return ::process_vm_readv(::getpid(), &to, 1, &from, 1, 0) == sizeof(word);
}

// Writes the frames of the interrupted code. After a call of a null or wild pointer the program
// counter does not point to code; then the frame of the caller, whose address is on top of the
// stack, is made the current one for the time of the unwinding.
void write_frames(FrameWriter writer, [[maybe_unused]] void* context) {
#if defined(__x86_64__)
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const greg_t counter = registers[REG_RIP];
  const greg_t stack = registers[REG_RSP];
  writer.begin = static_cast<uint64_t>(counter);
  uint64_t word = 0;
  if (!read_word(writer.begin, word) && read_word(static_cast<uint64_t>(stack), word)) {
    writer.write(writer.begin, /*is_exact=*/true);
    registers[REG_RIP] = static_cast<greg_t>(word);
    registers[REG_RSP] = stack + static_cast<greg_t>(sizeof(word));
    writer.begin = word;
  }
  _Unwind_Backtrace(on_frame, &writer);
  registers[REG_RIP] = counter;
  registers[REG_RSP] = stack;
#else
  writer.has_begun = true;
  _Unwind_Backtrace(on_frame, &writer);
#endif
}

void write_crash_file(const CrashState& state, const siginfo_t& info, int thread, void* context) {
  const int file =
      ::open(state.crash_file.c_str(), O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) return;
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  SafeText head;
  head << kCrashFileBegin << "signal " << info.si_signo << "\ncode " << info.si_code
       << "\naddress ";
  head.hex(info.si_code > 0 ? reinterpret_cast<uint64_t>(info.si_addr) : 0);
  head << "\nprocess " << state.process << "\nthread " << thread << "\ntime-ms "
       << int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000 << "\nmaps\n";
  head.write_to(file);
  write_all(file, read_maps(state.maps));
  write_all(file, "frames\n");
  write_frames({.file = file}, context);
  write_all(file, "end\n");
  ::close(file);
}

void report_crash(const CrashState& state, const siginfo_t& info, int thread, void* context) {
  const bool is_child =
      ::getpid() != state.process;  // true in a forked child; the crash file belongs to the parent
  SafeText line;
  line << "cadre: crashed with signal " << info.si_signo << " (" << name_of_crash(info.si_signo)
       << ")";
  if (info.si_code > 0) (line << ", address ").hex(reinterpret_cast<uint64_t>(info.si_addr));
  line << ", thread " << thread << "\n";
  line.write_to(STDERR_FILENO);
  if (is_child) return;
  if (!state.crash_file.empty()) return write_crash_file(state, info, thread, context);
  const std::string_view maps = read_maps(state.maps);
  write_frames({.file = STDERR_FILENO, .maps = maps, .is_for_reader = true}, context);
}

void on_crash(int signal, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  CrashState& state = *crash_state.load();
  const int thread = static_cast<int>(::syscall(SYS_gettid));
  int nobody = 0;
  if (state.crashed_thread.compare_exchange_strong(nobody, thread)) {
    report_crash(state, *info, thread, context);
  } else {
    // Another thread crashed first and ends the process when it has written its stack.
    constexpr timespec kLimit = {.tv_sec = 10, .tv_nsec = 0};
    ::nanosleep(&kLimit, nullptr);
  }
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  ::sigaction(signal, &action, nullptr);
  // A fault occurs again when the handler returns. A signal that was sent is sent again; it takes
  // effect when the handler returns, so a core dump has the registers of the crash.
  if (info->si_code <= 0) ::syscall(SYS_tgkill, ::getpid(), thread, signal);
  errno = saved_errno;
}

void on_terminate() {
  const CrashState& state = *crash_state.load();
  if (const std::exception_ptr exception = std::current_exception()) {
    // A failure to write the file is ignored: the process aborts next, and its crash handler writes
    // the crash file.
    [[maybe_unused]] const Status written = write_exception(state.error_file, exception);
  }
  if (state.previous_terminate != nullptr) state.previous_terminate();
  std::abort();
}

void* map_memory(size_t num_bytes) {
  void* const memory = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

// Gives this thread a stack for signals, unless it has one that is large enough.
void add_signal_stack() {
  stack_t present{};
  ::sigaltstack(nullptr, &present);
  if ((present.ss_flags & SS_DISABLE) == 0 && present.ss_size >= (32 << 10)) return;
  void* const memory = map_memory(kSignalStackBytes);
  if (memory == nullptr) return;
  const stack_t stack = {.ss_sp = memory, .ss_flags = 0, .ss_size = kSignalStackBytes};
  ::sigaltstack(&stack, nullptr);
}

}  // namespace

void install_crash_handlers(const std::string& error_file) {
  if (crash_state.load() != nullptr) return;
  void* const maps = map_memory(kMaxMapsBytes);
  if (maps == nullptr) return;
  auto state = std::make_unique<CrashState>();
  state->error_file = error_file;
  if (!error_file.empty()) state->crash_file = error_file + std::string(kCrashFileSuffix);
  state->process = ::getpid();
  state->maps = static_cast<char*>(maps);
  state->previous_terminate = std::get_terminate();
  crash_state.store(state.release());
  add_signal_stack();
  std::set_terminate(on_terminate);
  for (const int signal : kCrashSignals) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    if ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler != SIG_DFL) continue;
    action.sa_sigaction = on_crash;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigfillset(&action.sa_mask);
    ::sigaction(signal, &action, nullptr);
  }
}

}  // namespace cadre::os
