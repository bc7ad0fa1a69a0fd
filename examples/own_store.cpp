// A store that the program implements itself: it forwards requests to another store and counts
// them. The program uses only the core, without torch, and runs as one process.
#include <cadre/core.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

using namespace std::chrono_literals;

// This store forwards. A store that keeps the keys itself answers each request in answer()
// (docs/guide/reference/store.md).
class CountingStore final : public cadre::Store {
 public:
  explicit CountingStore(std::shared_ptr<cadre::Store> store)
      : Store(store->system()), store_(std::move(store)) {}

  int num_requests() const { return num_requests_; }

  cadre::Result<std::shared_ptr<cadre::Store>> clone(cadre::Deadline deadline) override {
    auto beneath = store_->clone(deadline);
    if (!beneath.ok()) return beneath.error();
    return std::shared_ptr<cadre::Store>(std::make_shared<CountingStore>(*beneath));
  }

 private:
  cadre::Result<cadre::wire::StoreResponse> answer(cadre::wire::StoreRequest request,
                                                   cadre::Deadline deadline) override {
    ++num_requests_;
    return store_->call(std::move(request), deadline);
  }

  std::shared_ptr<cadre::Store> store_;
  std::atomic<int> num_requests_{0};
};

int main() try {
  const auto system = cadre::os::make_native_system();
  const auto store = std::make_shared<CountingStore>(std::make_shared<cadre::HashStore>(*system));

  store->set("color", "blue", 5s);
  std::printf("color %s\n", store->get("color", 5s).c_str());
  std::printf("visits %d\n", static_cast<int>(store->add("visits", 2, 5s)));
  cadre::PrefixStore jobs("jobs", store);
  jobs.queue_push("waiting", "sweep", 5s);
  std::printf("popped %s\n", jobs.queue_pop("waiting", 5s).c_str());
  try {
    jobs.queue_pop("waiting", 50ms);
  } catch (const cadre::Error& error) {
    std::printf("%s\n", error.what());
  }
  std::printf("%d requests\n", store->num_requests());
} catch (const cadre::Error& error) {
  std::fprintf(stderr, "own_store: %s\n", error.what());
  return 1;
}
