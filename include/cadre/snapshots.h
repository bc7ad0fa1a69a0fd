// Saves and loads models and optimizers that are divided among ranks, on any number of ranks.
//
//   cadre::SnapshotFolder folder("runs/net");  // on a file system that all ranks share
//   cadre::SnapshotParts parts = cadre::parts_of(*net);
//   cadre::save_sharded(folder, step, parts, world);
//   if (const auto latest = folder.latest()) {
//     const auto loaded = cadre::load_sharded(*latest, parts, world);
//     // One process writes the file of the whole model, and the others wait for it.
//     cadre::on_main_rank(world, [&] { cadre::write_full_state(*latest, "net.safetensors"); });
//     cadre::load(*net, "net.safetensors");
//   }
//
// Declares:
// - `SnapshotFolder`: the snapshots of a run; each is complete or does not exist.
// - `save_sharded()`, `SaveOptions`, `check_savable()`: each rank writes its shard.
// - `load_sharded()`, `LoadOptions`, `LoadedSnapshot`: each rank reads only the values it holds.
// - `SnapshotParts`, `SnapshotTensor`: which elements this rank has of each tensor, and its
//   optimizer's state.
// - `parts_of()`, `part_of()`, `whole_tensor()`: make SnapshotParts of shards and modules.
// - `SnapshotEntries`, `entries_of()`, `without_copies()`, `slice_of()`: operate on SnapshotParts.
// - `state_dict()`, `load_state_dict()`, `StateDictOptions`, `LoadStateDictOptions`: the state of
//   an optimizer by parameter name.
// - `SnapshotSaver`: saves in the background.
// - `write_full_state()`, `SnapshotContent`: converts a snapshot to one safetensors file.
// - `save()`, `load()`, `named_state()`: a module in one safetensors file.
// - `ModuleWrapper`: the wrappers for which save() and load() give a compile error.
//
// Guide: docs/guide/training/snapshots.md. PyTorch: torch.distributed.checkpoint.
#pragma once

#include "cadre/train/checkpoint/full_state.h"
#include "cadre/train/checkpoint/module_file.h"
#include "cadre/train/checkpoint/optimizer_state.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/sharded_save.h"
#include "cadre/train/checkpoint/snapshot_folder.h"
#include "cadre/train/checkpoint/snapshot_parts.h"
#include "cadre/train/checkpoint/snapshot_saver.h"
