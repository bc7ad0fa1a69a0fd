#include "cadre/core/comm/queue/operation_queue.h"

#include <array>
#include <exception>
#include <utility>
#include <vector>

#include "cadre/core/collective/op.h"
#include "cadre/core/comm/queue/thrown_error.h"

namespace cadre {
namespace {

OpKind kind_of(const Fingerprint& fingerprint) {
  return OpDescriptor::from_fingerprint(fingerprint).kind;
}

}  // namespace

class OperationQueue::Issued final : public IssuedOperation {
 public:
  // Owns the collectives and fingerprints.
  Issued(std::shared_ptr<ProgressQueue> queue, Operation issued)
      : IssuedOperation(std::move(queue), std::move(issued.keep_alive), issued.call),
        operation(std::move(issued)),
        collectives_(operation.collectives.begin(), operation.collectives.end()),
        fingerprints_(operation.fingerprints.begin(), operation.fingerprints.end()) {
    operation.collectives = collectives_;
    operation.fingerprints = fingerprints_;
  }

  size_t num_numbers() const override { return fingerprints_.size(); }
  OpKind first_kind() const override { return kind_of(fingerprints_.front()); }
  Status order_current_stream() const override { return completion->order_current_stream(); }

  Operation operation;
  std::optional<Completion> completion;  // is set before the operation is enqueued

 private:
  const std::vector<Collective> collectives_;
  const std::vector<Fingerprint> fingerprints_;
};

void OperationQueue::run(Operation& operation) {
  std::shared_ptr<Issued> issued;
  if (const auto number = try_begin_alone(operation.fingerprints.size())) {
    operation.number = *number;
    const Completion completion = run_alone(operation, issued);
    if (issued == nullptr) {
      if (completion.status().ok()) return;
      const NamedCall named{operation.call, kind_of(operation.fingerprints.front()), *number,
                            operation.fingerprints.size()};
      throw named.renamed(completion.status().error());
    }
  } else {
    issued = std::make_shared<Issued>(shared_from_this(), operation);
    post(std::array<Handle, 1>{issued}, MovedBy::kCaller);
  }
  issued->wait(std::nullopt);
  operation.number = issued->number();
  operation.allocated = std::move(issued->operation.allocated);
}

Completion OperationQueue::run_alone(Operation& operation, std::shared_ptr<Issued>& enqueued) {
  const HeldRole role(*this);
  Completion completion = run_caught(operation);
  if (completion.is_done()) {
    end_alone();
  } else {
    enqueued = std::make_shared<Issued>(shared_from_this(), operation);
    begin_alone(*enqueued, operation.number);
    enqueued->completion = completion;
    enqueue(*enqueued, completion);
  }
  return completion;
}

Work OperationQueue::issue(Operation operation) {
  auto issued = std::make_shared<Issued>(shared_from_this(), std::move(operation));
  post(std::array<Handle, 1>{issued}, MovedBy::kThread);
  return Work(std::move(issued));
}

Work OperationQueue::issue_here(Operation operation) {
  const auto issued = std::make_shared<Issued>(shared_from_this(), std::move(operation));
  if (const auto number = try_begin_alone(issued->num_numbers())) {
    const HeldRole role(*this);
    begin_alone(*issued, *number);
    submit(*issued);
  } else if (is_any_on_this_thread()) {
    post(std::array<Handle, 1>{issued}, MovedBy::kThread);
  } else {
    post(std::array<Handle, 1>{issued}, MovedBy::kCaller);
    await_start(*issued);
  }
  return Work(issued);
}

// Runs the operation, which has its number, until it has ended or the engine has enqueued it.
void OperationQueue::submit(Issued& issued) {
  issued.operation.number = issued.number();
  // The runner may copy this pointer to the owner while it runs. end() releases the pointer of the
  // operation.
  issued.operation.keep_alive = issued.keep_alive();
  const Completion completion = run_caught(issued.operation);
  issued.operation.keep_alive.reset();
  if (completion.is_done()) {
    end(issued, completion.status());
  } else {
    issued.completion = completion;
    enqueue(issued, completion);
  }
}

void OperationQueue::advance(const IssuedOperation* until) {
  while (!is_over(until)) {
    const Handle oldest = begin_oldest();
    if (oldest == nullptr) return;  // close() has removed the operations and ends them
    submit(static_cast<Issued&>(*oldest));
  }
}

Completion OperationQueue::run_caught(Operation& operation) {
  try {
    return runner_.run(operation);
  } catch (const std::exception& thrown) {
    return error_of(thrown);
  }
}

}  // namespace cadre
