#include "cadre/launch/job/output/worker_output.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace cadre::launch {
namespace {

LineSplitter::Returns returns_on(const BufferedOutput& sink) {
  return sink.is_terminal() ? LineSplitter::Returns::kRewriteTheLine : LineSplitter::Returns::kKept;
}

}  // namespace

WorkerOutput::WorkerOutput(WorkerOutputOptions options, BufferedOutput& output,
                           BufferedOutput& error)
    : options_(std::move(options)),
      output_{.sink = &output,
              .targets = options_.output,
              .splitter = LineSplitter(returns_on(output))},
      error_{
          .sink = &error, .targets = options_.error, .splitter = LineSplitter(returns_on(error))} {}

void WorkerOutput::show(Lane& target, const LinePiece& piece) {
  const bool is_shown = target.targets.is_shown;
  if (is_shown && !options_.is_raw && !piece.was_shown) {
    target.sink->append_piece(&target, options_.prefix, piece);
  }
  if (target.targets.filter != nullptr) {
    target.targets.filter->add(target.filtered, options_.prefix, piece);
  }
  tail_.add(piece, is_shown ? target.sink : nullptr);
}

void WorkerOutput::feed(Lane& target, std::string_view bytes, TimePoint now) {
  target.last_fed = now;
  target.is_overdue = false;
  if (options_.is_raw && target.targets.is_shown) target.sink->append(bytes);
  if (target.targets.file != nullptr) target.targets.file->write(bytes);
  target.splitter.feed(bytes, [&](const LinePiece& piece) {
    show(target, piece);
    if (piece.ends_line) {
      target.sink->release(&target);
      target.has_claimed = false;
    } else if (target.targets.is_shown && !options_.is_raw &&
               !std::exchange(target.has_claimed, true)) {
      target.sink->claim(&target, now + kClaim);
    }
  });
}

bool WorkerOutput::pump(Stream stream, os::PipeReader& from, Bytes buffer, TimePoint now) {
  Lane& target = lane(stream);
  if (target.has_ended) return false;
  if (!may_write(target, now)) return true;
  const auto chunk = from.try_read(buffer);
  if (chunk.num_bytes > 0) {
    feed(target, {reinterpret_cast<const char*>(buffer.data()), chunk.num_bytes}, now);
  }
  target.has_ended = chunk.has_ended;
  if (target.has_ended) finish_lane(target);
  return !target.has_ended;
}

void WorkerOutput::show_progress(TimePoint now) {
  if (options_.is_raw) return;
  for (Lane* target : {&output_, &error_}) {
    if (!target->targets.is_shown || !may_write(*target, now)) continue;
    if (const auto progress = target->splitter.take_progress()) {
      target->sink->append_line(options_.prefix, *progress);
    }
  }
}

void WorkerOutput::show_unfinished(TimePoint now) {
  for (Lane* target : {&output_, &error_}) {
    if (!target->splitter.is_in_line() || target->is_overdue) continue;
    // While the output is full, the idle time does not count, because the worker may be blocked on
    // its pipe.
    if (target->targets.is_shown && target->sink->is_full()) target->last_fed = now;
    if (now - target->last_fed < kIdle) continue;
    target->sink->release(target);
    if (!may_write(*target, now)) continue;
    target->splitter.flush([&](const LinePiece& piece) { show(*target, piece); });
    target->is_overdue = true;
  }
}

std::optional<TimePoint> WorkerOutput::next_due(TimePoint now) const {
  std::optional<TimePoint> due;
  for (const Lane* target : {&output_, &error_}) {
    std::optional<TimePoint> own;
    if (target->targets.is_shown && target->sink->is_claimed_by_other(target, now)) {
      own = target->sink->claimed_until();
    } else if (target->splitter.is_in_line() && !target->is_overdue) {
      own = target->last_fed + kIdle;
    }
    if (own) due = due ? std::min(*due, *own) : *own;
  }
  return due;
}

void WorkerOutput::finish_lane(Lane& target) {
  target.splitter.finish([&](const LinePiece& piece) { show(target, piece); });
  target.sink->release(&target);
}

void WorkerOutput::finish() {
  for (Lane* target : {&output_, &error_}) finish_lane(*target);
}

}  // namespace cadre::launch
