// Cadre: distributed training for C++ on libtorch. One header for programs; each part documents its
// own threads, blocking, lifetime and errors.
#pragma once

#if __cplusplus < 202002L
#error "Cadre's headers are C++20: compile with -std=c++20 (in CMake: set(CMAKE_CXX_STANDARD 20))"
#else
#include "cadre/base/error.h"
#include "cadre/checkpoint/module_file.h"
#include "cadre/checkpoint/snapshot_folder.h"
#include "cadre/data/data_loader.h"
#include "cadre/data/distributed_sampler.h"
#include "cadre/data/mnist.h"
#include "cadre/group/process_group.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"

#endif
