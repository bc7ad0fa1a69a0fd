#include "cadre/tensor/hooks/operations/parameter_uses.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "cadre/core/os/keep_until_exit.h"
#include "cadre/tensor/hooks/operations/written_argument.h"

namespace cadre::wrap {
namespace {

// libtorch defines this key for tests of its dispatcher and registers nothing for it. Its place is
// above autograd and autocast. DeferredInit, the other free key there, is that of defer_init(),
// which must see the views that the kernel below must not.
constexpr c10::DispatchKey kObserved = c10::DispatchKey::TESTING_ONLY_GenericWrapper;
constexpr c10::DispatchKeySet kBelowObserved(c10::DispatchKeySet::FULL_AFTER, kObserved);

// TensorImpl has no public function that adds a key, so this class names its protected member.
struct KeysOf : c10::TensorImpl {
  static void set(const at::Tensor& tensor, bool is_observed) {
    c10::DispatchKeySet& keys = tensor.unsafeGetTensorImpl()->*(&KeysOf::key_set_);
    keys = is_observed ? keys.add(kObserved) : keys.remove(kObserved);
  }
};

struct Observation {
  std::weak_ptr<UseObserver> observer;
  size_t number;
};

// The observed storages.
class Table {
 public:
  static Table& instance() {
    // The kernel, which looks storages up here, has no context argument. The table is never
    // destroyed, because wrappers may be destroyed at exit, in any order.
    static Table& table = *os::keep_until_exit(std::make_unique<Table>());
    return table;
  }
  void add(const c10::Storage& storage, const Observation& observation) {
    const std::lock_guard lock(mutex_);
    observations_[storage.unsafeGetStorageImpl()] = observation;
  }
  void remove(const c10::Storage& storage) {
    const std::lock_guard lock(mutex_);
    observations_.erase(storage.unsafeGetStorageImpl());
  }
  std::optional<Observation> find(const c10::StorageImpl* storage) const {
    const std::shared_lock lock(mutex_);
    const auto found = observations_.find(storage);
    return found == observations_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Observation> observations_;
};

// The uses of one operation. They end when this object is destroyed.
class Uses {
 public:
  Uses() = default;
  ~Uses() {
    for (const auto& [observer, use] : begun_) observer->end_use(use);
  }
  Uses(const Uses&) = delete;
  Uses& operator=(const Uses&) = delete;

  void begin_all(const c10::Argument& argument, const c10::IValue& value) {
    if (value.isTensor()) {
      begin(*value.unsafeToTensorImpl(), is_written(argument));
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) begin_all(argument, element);
    }
  }

  void begin(const c10::TensorImpl& tensor, bool is_written) {
    if (!tensor.key_set().has(kObserved) || !tensor.has_storage()) return;
    const auto observation = Table::instance().find(tensor.unsafe_storage().unsafeGetStorageImpl());
    if (!observation) return;
    std::shared_ptr<UseObserver> observer = observation->observer.lock();
    if (!observer) return;
    const UseObserver::Use use{.number = observation->number, .is_written = is_written};
    observer->begin_use(use);
    begun_.emplace_back(std::move(observer), use);
  }

 private:
  c10::SmallVector<std::pair<std::shared_ptr<UseObserver>, UseObserver::Use>, 4> begun_;
};

void run_observed(const c10::OperatorHandle& operation, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
  Uses uses;
  const std::vector<c10::Argument>& arguments = operation.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    uses.begin_all(arguments[i], torch::jit::peek(*stack, i, arguments.size()));
  }
  operation.redispatchBoxed(keys & kBelowObserved, stack);
}

// Returns whether the operation returns only views of its arguments.
bool is_view(const c10::FunctionSchema& schema) {
  const auto is_alias = [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  };
  return !schema.returns().empty() && std::ranges::all_of(schema.returns(), is_alias) &&
         std::ranges::none_of(schema.arguments(), is_written);
}

// Returns whether the operation uses the shape of its arguments and not their values.
bool uses_shape_only(const std::string_view name) {
  return name.ends_with("_like") || name.starts_with("aten::new_") || name == "aten::is_same_size";
}

// Returns whether the operation calls others for all that it does.
bool is_composed(const c10::OperatorHandle& operation) {
  const auto has = [&](c10::DispatchKey key) { return operation.hasKernelForDispatchKey(key); };
  return has(c10::DispatchKey::CompositeImplicitAutograd) && !has(c10::DispatchKey::CPU) &&
         !has(c10::DispatchKey::CUDA) && !has(c10::DispatchKey::PrivateUse1);
}

struct Registrations {
  torch::Library kernel;
  std::vector<c10::RegistrationHandleRAII> passed_by;
};

Registrations make_registrations() {
  Registrations made{
      .kernel = torch::Library(torch::Library::IMPL, "_", kObserved, __FILE__, __LINE__),
      .passed_by = {}};
  made.kernel.fallback(torch::CppFunction::makeFromBoxedFunction<&run_observed>());
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto operation = dispatcher.findSchema(name);
    if (!operation) continue;
    if (!is_composed(*operation) && !is_view(operation->schema()) && !uses_shape_only(name.name)) {
      continue;
    }
    made.passed_by.push_back(
        dispatcher.registerImpl(name, kObserved, c10::KernelFunction::makeFallthrough(),
                                std::nullopt, nullptr, "cadre: reads nothing"));
  }
  return made;
}

void install_kernel() {
  // The registrations last until the process ends, because observed parameters may.
  static const Registrations& installed = os::keep_until_exit(make_registrations());
  static_cast<void>(installed);
}

bool is_observed(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(kObserved);
}

}  // namespace

void tell_written(const at::Tensor& tensor) {
  Uses().begin(*tensor.unsafeGetTensorImpl(), /*is_written=*/true);
}

ObservedParameters::ObservedParameters(std::vector<at::Tensor> parameters,
                                       std::weak_ptr<UseObserver> observer, size_t number)
    : parameters_(std::move(parameters)) {
  install_kernel();
  for (const at::Tensor& parameter : parameters_) {
    storages_.push_back(parameter.storage());
    Table::instance().add(parameter.storage(), {.observer = observer, .number = number});
    KeysOf::set(parameter, true);
  }
}

ObservedParameters::~ObservedParameters() {
  for (const c10::Storage& storage : storages_) Table::instance().remove(storage);
  for (const at::Tensor& parameter : parameters_) KeysOf::set(parameter, false);
}

std::optional<size_t> ObservedParameters::first_lost() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const bool has_same_memory =
        parameters_[i].storage().unsafeGetStorageImpl() == storages_[i].unsafeGetStorageImpl();
    if (!is_observed(parameters_[i]) || !has_same_memory) return i;
  }
  return std::nullopt;
}

}  // namespace cadre::wrap
