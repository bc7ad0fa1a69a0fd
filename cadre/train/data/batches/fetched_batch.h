// Fetching batches: on threads ahead of the caller, checked, and in pinned memory if requested.
//
// Threads: a ThreadedFetch is used by one thread, and runs `make` on others. Blocking: its next()
// waits for one batch, at most for the timeout of the options; the destructor waits until the
// threads have finished their batches. Errors: kInvalidArgument for a batch with a wrong number of
// rows; the exceptions of `make`; kTimeout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/os/native/native_thread.h"
#include "cadre/core/os/system.h"
#include "cadre/train/data/batches/prefetcher.h"
#include "cadre/train/data/dataset.h"

namespace cadre {

// Returns the batch if it has a row for each of num_samples samples: fewer rows would change the
// mean over the batch. source: what made it, such as "DataLoader: Dataset::get".
Batch checked_batch(std::string_view source, Batch batch, size_t num_samples);

// Returns the batch, in pinned memory if is_pinned.
Batch placed_batch(Batch batch, bool is_pinned);

// Throws kInvalidArgument for a number of threads or a prefetch that is out of range.
void check_fetch_threads(std::string_view loader, int num_threads, int64_t prefetch);

// Items that threads make ahead of time, and the system on whose threads they do.
template <typename T>
struct ThreadedFetch {
  ThreadedFetch(int64_t num_items, std::function<T(int64_t)> make, const PrefetchOptions& options)
      : items(*system, num_items, std::move(make), options) {}

  std::unique_ptr<os::System> system = os::make_native_system();
  Prefetcher<T> items;
};

// Ends a fetch whose next() has thrown; `fetch` is null afterwards, so that the next request makes
// the same item again. Returns true if the item was not ready in time: its threads may not end for
// a long time, so another thread waits for them, and they still use what they use.
template <typename Fetch>
bool end_failed_fetch(std::unique_ptr<Fetch>& fetch) {
  const bool is_late = fetch->items.has_timed_out();
  if (is_late) {
    // A std::function must be copyable, and a lambda that owns a unique_ptr is not.
    std::shared_ptr<Fetch> kept = std::move(fetch);
    os::run_detached("cadre-closer", [kept = std::move(kept)]() mutable { kept.reset(); });
  }
  fetch.reset();
  return is_late;
}

}  // namespace cadre
