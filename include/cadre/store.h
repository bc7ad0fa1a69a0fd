// Keys and values that the ranks of a job share, in memory, in a file or at a server.
//
//   const auto shared = std::make_shared<cadre::HashStore>(*system);
//   cadre::PrefixStore store("round 3", shared);
//   store.set("color", "blue", std::chrono::seconds(5));
//   const std::string color = store.get("color", std::chrono::seconds(5));
//   const int64_t visits = store.add("visits", 2, std::chrono::seconds(5));
//
// Declares:
// - `Store`: the requests to a store, and the interface for stores of your own.
// - `HashStore`: a store in the memory of one process.
// - `FileStore`, `FileStoreOptions`: a store in one file that all ranks see.
// - `TcpStore`, `TcpStoreOptions`, `StoreProtocol`, `StoreRoute`: a store at a server: Cadre's or
//   c10d's.
// - `PrefixStore`: a view of a store that puts a prefix before every key.
// - `StoreTime`, `StoreResult`: the time limit of a call and its result. With a Duration a call
//   returns a value or throws; with a Deadline it returns a Result.
// - `StoreWill`: a value that is appended to a key when this process dies.
// - `wire::StoreRequest`, `wire::StoreResponse`, `wire::StoreVerb`: a request and its response as
//   values.
//
// Guide: docs/guide/reference/store.md. PyTorch: torch.distributed.Store, HashStore, FileStore,
// TCPStore, PrefixStore.
#pragma once

#include "cadre/core/store/file/file_store.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/core/store/prefix_store.h"
#include "cadre/core/store/store.h"
#include "cadre/core/store/tcp/tcp_store.h"
#include "cadre/core/wire/store/store_request.h"
