#include "cadre/train/trainer/tasks/task.h"

namespace cadre::train {

std::unique_ptr<Task> make_task(const Config& config, Deadline deadline) {
  if (config.data.kind == "text") return make_text_task(config, deadline);
  return make_image_task(config);
}

}  // namespace cadre::train
