// The core of Cadre in one header: groups of ranks over bytes, complete without torch.
//
// A program calls os::make_native_system(), connect_from_environment(), the operations of the
// Communicator, and its close(). Without a launcher: a Rendezvous, then Communicator::connect().
// Keys and values beside the groups, and a Store of the program's own: core/store/store.h.
// Schedules of pipeline parallelism are values of their own (core/schedule/).
#pragma once

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/backend_factory.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/connect.h"
#include "cadre/core/comm/groups/rejoin_group.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/comm/queue/work.h"
#include "cadre/core/fabric/flight/flight_record.h"
#include "cadre/core/os/defaults.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/file_rendezvous.h"
#include "cadre/core/rendezvous/rendezvous.h"
#include "cadre/core/rendezvous/tcp_rendezvous.h"
#include "cadre/core/schedule/check.h"
#include "cadre/core/schedule/generate.h"
#include "cadre/core/schedule/lowering.h"
#include "cadre/core/schedule/partition.h"
#include "cadre/core/schedule/schedule_csv.h"
#include "cadre/core/schedule/simulate.h"
#include "cadre/core/schedule/timeline_svg.h"
#include "cadre/core/schedule/timeline_text.h"
#include "cadre/core/store/file/file_store.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/core/store/prefix_store.h"
#include "cadre/core/store/store.h"
#include "cadre/core/store/tcp/tcp_store.h"
#include "cadre/core/wire/store/store_request.h"
