// How the processes of a job find each other without a launcher: by an address or by a file.
//
//   const auto address = cadre::parse_tcp_url("tcp://127.0.0.1:29500").value_or_throw();
//   cadre::TcpRendezvous meeting(*system,
//                                {.address = address, .rank = rank, .world_size = world_size});
//   const cadre::Membership membership =
//       cadre::join_within(*system, meeting, cadre::kDefaultConnectTimeout);
//   const auto group = cadre::Communicator::connect(*system, membership, {}, deadline);
//
// Declares:
// - `Membership`: the result of a rendezvous: this process's rank, the number of ranks, the store,
//   and the round, a number that grows when the survivors of a failure meet again.
// - `Rendezvous`: the interface.
// - `TcpRendezvous`, `TcpRendezvousOptions`, `parse_tcp_url()`: a rendezvous at the address of rank
//   0.
// - `FileRendezvous`, `FileRendezvousOptions`, `parse_file_url()`: a rendezvous through a file.
// - `join_within()`: joins within a timeout, and throws on failure.
// - `rejoin()`, `rejoin_within()`: the surviving ranks of a round start the next round.
// - `check_place()`: checks that a rank is below its world size.
//
// Guide: docs/guide/running/without-a-launcher.md. PyTorch: torch.distributed.rendezvous, tcp://
// and file://.
#pragma once

#include "cadre/core/rendezvous/file_rendezvous.h"
#include "cadre/core/rendezvous/rendezvous.h"
#include "cadre/core/rendezvous/tcp_rendezvous.h"
