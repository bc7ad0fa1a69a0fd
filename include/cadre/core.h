// The core of Cadre in one header: groups of ranks over bytes, complete without torch.
//
//   const auto system = cadre::os::make_native_system();
//   const auto group = cadre::connect_from_environment(
//       *system, {}, system->deadline_in(cadre::kDefaultConnectTimeout));
//   group->barrier();
//   group->close(system->deadline_in(cadre::kDefaultCloseTimeout));
//
// A program without a launcher joins a Rendezvous and calls Communicator::connect(). Each topic has
// a header of its own, which compiles faster.
//
// Guide: docs/guide/reference/topics.md.
#pragma once

#include "cadre/backend.h"
#include "cadre/collectives.h"
#include "cadre/communicator.h"
#include "cadre/error.h"
#include "cadre/flight_record.h"
#include "cadre/groups.h"
#include "cadre/launch.h"
#include "cadre/log.h"
#include "cadre/pipeline_schedule.h"
#include "cadre/rendezvous.h"
#include "cadre/store.h"
#include "cadre/system.h"
#include "cadre/types.h"
