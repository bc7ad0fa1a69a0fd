// The core of Cadre in one header: groups of ranks over bytes, complete without torch.
//
// A program calls os::make_native_system(), connect_from_environment(), the operations of the
// Communicator, and its close(). Without a launcher: a Rendezvous, then Communicator::connect().
// Keys and values beside the groups: TimedStore; a Store of the program's own: store/store.h.
// Schedules of pipeline parallelism are values of their own (pipeline/).
#pragma once

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/base/types.h"
#include "cadre/comm/communicator.h"
#include "cadre/comm/connect.h"
#include "cadre/comm/defaults.h"
#include "cadre/comm/flight_record.h"
#include "cadre/comm/groups/backend_factory.h"
#include "cadre/comm/groups/rejoin_group.h"
#include "cadre/comm/groups/split.h"
#include "cadre/comm/work.h"
#include "cadre/os/system.h"
#include "cadre/pipeline/check.h"
#include "cadre/pipeline/generate.h"
#include "cadre/pipeline/lowering.h"
#include "cadre/pipeline/partition.h"
#include "cadre/pipeline/schedule_csv.h"
#include "cadre/pipeline/simulate.h"
#include "cadre/pipeline/timeline_svg.h"
#include "cadre/pipeline/timeline_text.h"
#include "cadre/rendezvous/file_rendezvous.h"
#include "cadre/rendezvous/rendezvous.h"
#include "cadre/rendezvous/tcp_rendezvous.h"
#include "cadre/store/file_store.h"
#include "cadre/store/hash_store.h"
#include "cadre/store/prefix_store.h"
#include "cadre/store/store.h"
#include "cadre/store/tcp_store.h"
#include "cadre/store/timed_store.h"
#include "cadre/wire/store/store_request.h"
