#include "cadre/comm/queue/operation_queue.h"

#include <array>
#include <exception>
#include <utility>

#include "cadre/comm/queue/thrown_error.h"

namespace cadre {

class OperationQueue::Issued final : public IssuedOperation {
 public:
  Issued(std::shared_ptr<ProgressQueue> queue, Operation issued)
      : IssuedOperation(std::move(queue), std::move(issued.keep_alive)),
        operation(std::move(issued)) {}
  std::string describe() const override { return operation.descriptor.to_string(); }

  Operation operation;
};

void OperationQueue::run(Operation& operation) {
  if (try_begin_alone(operation.number)) {
    HeldRole role(*this);
    const Status status = run_caught(operation);
    role.note_end();
    return status.value_or_throw();
  }
  const auto issued = std::make_shared<Issued>(shared_from_this(), operation);
  post(std::array<Handle, 1>{issued}, MovedBy::kCaller);
  issued->wait(std::nullopt);
  operation = std::move(issued->operation);
}

Work OperationQueue::issue(Operation operation) {
  auto issued = std::make_shared<Issued>(shared_from_this(), std::move(operation));
  post(std::array<Handle, 1>{issued}, MovedBy::kThread);
  return Work(std::move(issued));
}

void OperationQueue::advance(const IssuedOperation* until) {
  while (!is_over(until)) {
    const Handle oldest = begin_oldest();
    if (oldest == nullptr) return;  // close() has taken them out and ends them
    Operation& operation = static_cast<Issued&>(*oldest).operation;
    operation.number = oldest->number();
    end(*oldest, run_caught(operation));
  }
}

Status OperationQueue::run_caught(Operation& operation) {
  try {
    return runner_.run(operation);
  } catch (const std::exception& thrown) {
    return error_of(thrown);
  }
}

}  // namespace cadre
