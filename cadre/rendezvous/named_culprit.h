// The rank that another one holds to be at fault for the failure of its groups, in the store of the
// job. The launcher reads it to tell the first failure from those that follow from it.
//
// Threads: any. Blocking: until the deadline. Lifetime: values. Errors: those of the store;
// kCorruption for a value that is no rank. Ranks are those of the job, as in RANK. Key:
// docs/formats/store-keys.md.
#pragma once

#include <optional>

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/base/export.h"
#include "cadre/base/types.h"
#include "cadre/store/store.h"

namespace cadre {

struct NamedCulprit {
  Rank writer;
  Rank culprit;
};

CADRE_EXPORT Status name_culprit(Store& store, const NamedCulprit& named, Deadline deadline);
// The rank that `writer` has named; nullopt for none.
CADRE_EXPORT Result<std::optional<Rank>> read_culprit(Store& store, Rank writer, Deadline deadline);
// Of a rank that goes on after the failure.
CADRE_EXPORT Status forget_culprit(Store& store, Rank writer, Deadline deadline);

}  // namespace cadre
