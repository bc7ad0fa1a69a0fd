#include "cadre/train/trainer/tasks/task.h"

#include "cadre/train/trainer/tasks/image_task.h"
#include "cadre/train/trainer/tasks/text_task.h"

namespace cadre::train {

std::unique_ptr<Task> make_task(const Config& config, Deadline deadline) {
  if (config.data.kind == "text") return std::make_unique<TextTask>(config, deadline);
  return std::make_unique<ImageTask>(config);
}

}  // namespace cadre::train
