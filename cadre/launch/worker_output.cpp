#include "cadre/launch/worker_output.h"

#include <array>
#include <cstddef>
#include <utility>

namespace cadre::launch {
namespace {

constexpr size_t kChunkBytes = 64 << 10;

}  // namespace

WorkerOutput::WorkerOutput(WorkerOutputOptions options, BufferedOutput& output,
                           BufferedOutput& error)
    : options_(std::move(options)), output_{.sink = &output}, error_{.sink = &error} {}

LineSplitter::Emit WorkerOutput::emitter(Lane& lane) {
  return [this, &lane](std::string_view line) {
    tail_.add(line);
    if (!options_.is_raw) lane.sink->append_line(options_.prefix, line);
  };
}

bool WorkerOutput::pump(Stream stream, os::PipeReader& from) {
  Lane& target = lane(stream);
  if (target.has_ended) return false;
  if (target.sink->is_full()) return true;
  std::array<std::byte, kChunkBytes> buffer;
  const auto chunk = from.try_read(buffer);
  const std::string_view bytes(reinterpret_cast<const char*>(buffer.data()), chunk.num_bytes);
  if (options_.is_raw) target.sink->append(bytes);
  target.splitter.feed(bytes, emitter(target));
  target.has_ended = chunk.has_ended;
  return !target.has_ended;
}

void WorkerOutput::show_progress() {
  if (options_.is_raw) return;
  for (Lane* target : {&output_, &error_}) {
    if (const auto progress = target->splitter.take_progress()) {
      target->sink->append_line(options_.prefix, *progress);
    }
  }
}

void WorkerOutput::finish() {
  for (Lane* target : {&output_, &error_}) target->splitter.finish(emitter(*target));
}

}  // namespace cadre::launch
