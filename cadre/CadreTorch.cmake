# Builds everything that uses torch. Sources that include torch's C++ API (modules, optimizers)
# share one precompiled torch/torch.h; the others use per-operator ATen headers.
set(torch_folders tensor/device tensor/backends tensor/group tensor/hooks tensor/mesh tensor/optim parallel/deferred
                  parallel/shard parallel/layers parallel/buckets parallel/reduction parallel/plan
                  parallel/ddp parallel/zero parallel/fsdp parallel/tp parallel/ep parallel/pp parallel/batchnorm
                  parallel/comm_hooks parallel/averaging parallel/data_parallel train/data train/checkpoint
                  train/verify train/training)
if(CADRE_SANITIZE)  # those that the tests use which run under sanitizers
  list(REMOVE_ITEM torch_folders parallel/layers parallel/plan parallel/tp parallel/ep parallel/pp train/checkpoint
       train/training)
endif()
cadre_sources(torch_sources library ${torch_folders})
if(NOT torch_sources)
  return()
endif()

# The precompiled header torch/torch.h. Loading it takes g++ about five seconds for each file, so
# only files that would take longer without it load it. clang++ loads only the parts that it needs.
cadre_precompiled_headers(cadre_torch_pch <torch/torch.h>)
target_link_libraries(cadre_torch_pch PUBLIC LibTorch::LibTorch)
# These pay also where those of the core do not (see CadreCompiler.cmake).
set_target_properties(cadre_torch_pch PROPERTIES DISABLE_PRECOMPILE_HEADERS OFF)
if(CADRE_WITH_TESTS AND (CADRE_TEST_COMPILER OR CADRE_SANITIZE))
  cadre_precompiled_test_headers(cadre_torch_test_pch <torch/torch.h> <gtest/gtest.h>)
  target_link_libraries(cadre_torch_test_pch PUBLIC LibTorch::LibTorch)
  set_target_properties(cadre_torch_test_pch PROPERTIES DISABLE_PRECOMPILE_HEADERS OFF)
endif()

# cadre_reuse_torch_headers(TARGET [size [headers]]): lets TARGET use precompiled headers. `size` is
# the largest number of sources in a unit, `headers` the target that precompiles. In each unit of
# the library g++ spends 10 to 20 seconds on loading these headers and on templates that other units
# instantiate, too.
function(cadre_reuse_torch_headers target)
  set(headers cadre_torch_pch)
  if(ARGC GREATER 2)
    set(headers ${ARGV2})
  endif()
  cadre_reuse_precompiled_headers(${target} ${headers})
  set_target_properties(${target} PROPERTIES DISABLE_PRECOMPILE_HEADERS OFF)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cpp$")
  foreach(source IN LISTS sources)
    get_filename_component(file ${source} ABSOLUTE)
    cadre_reaches(uses_api ${file} "^#include <torch/(torch|types|nn|optim)[./]")
    if(NOT uses_api AND headers STREQUAL "cadre_torch_pch")
      set_source_files_properties(${source} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
    endif()
  endforeach()
  if(headers STREQUAL "cadre_torch_pch" AND ARGC GREATER 1)
    cadre_unity(${target} ${ARGV1} WITH_SUBFOLDERS)
  elseif(ARGC GREATER 1)
    cadre_unity(${target} ${ARGV1})
  endif()
  set_target_properties(${target} PROPERTIES JOB_POOL_COMPILE torch_compile)
endfunction()

add_library(cadre_torch_objects OBJECT ${torch_sources})
target_include_directories(cadre_torch_objects PUBLIC ${CMAKE_SOURCE_DIR})
target_link_libraries(cadre_torch_objects PRIVATE cadre_options PUBLIC LibTorch::LibTorch)
cadre_reuse_torch_headers(cadre_torch_objects 10)

add_library(cadre SHARED $<TARGET_OBJECTS:cadre_torch_objects>)
target_link_libraries(cadre PUBLIC cadre_core LibTorch::LibTorch)

# The trainer and verify are the only folders that use all wrappers.
cadre_sources(train_sources library train/trainer)
if(train_sources AND NOT CADRE_SANITIZE)
  find_package(tomlplusplus REQUIRED)
  find_package(CLI11 REQUIRED)
  add_library(cadre_train_objects OBJECT ${train_sources})
  target_link_libraries(cadre_train_objects PRIVATE cadre_options PUBLIC cadre_torch_objects
                                                                        nlohmann_json::nlohmann_json)
  cadre_reuse_torch_headers(cadre_train_objects 10)
  if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/train/trainer/cadre_train_main.cpp)
    add_executable(cadre_train train/trainer/cadre_train_main.cpp $<TARGET_OBJECTS:cadre_train_objects>)
    set_target_properties(cadre_train PROPERTIES OUTPUT_NAME cadre-train RUNTIME_OUTPUT_DIRECTORY
                                                 ${CMAKE_BINARY_DIR}/libexec/cadre)
    target_link_libraries(cadre_train PRIVATE cadre cadre_options nlohmann_json::nlohmann_json)
    cadre_reuse_torch_headers(cadre_train)
  endif()
endif()

# cadre_torch_test(BINARY source...): adds a test program. There are few large ones, because linking
# and the start of libtorch take most of the time.
function(cadre_torch_test name)
  add_executable(${name} ${ARGN} $<TARGET_OBJECTS:cadre_torch_objects>
                         $<TARGET_OBJECTS:cadre_core_objects>)
  target_sources(${name} PRIVATE $<TARGET_OBJECTS:cadre_testing_objects>
                                 $<TARGET_OBJECTS:cadre_support_objects>)
  target_link_libraries(
    ${name} PRIVATE LibTorch::LibTorch GTest::gtest_main GTest::gmock OpenSSL::Crypto ZLIB::ZLIB
                    Threads::Threads rt nlohmann_json::nlohmann_json)
  # By file: their targets would bring include folders that the torch wheel's fmt shadows.
  target_link_libraries(${name} PRIVATE $<TARGET_LINKER_FILE:fmt::fmt>
                                        $<TARGET_LINKER_FILE:spdlog::spdlog>)
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR})
  cadre_compile_as_test(${name})
  set(headers cadre_torch_pch)
  if(TARGET cadre_torch_test_pch)
    set(headers cadre_torch_test_pch)
  endif()
  cadre_reuse_torch_headers(${name} 6 ${headers})
endfunction()

if(CADRE_WITH_TESTS)
  # The tests of several folders form one program: device and backends; ddp, zero, fsdp and batchnorm; layers,
  # tp and ep.
  set(folders_of_device tensor/device tensor/backends)
  set(folders_of_parallel parallel/ddp parallel/zero parallel/fsdp parallel/batchnorm parallel/comm_hooks
                          parallel/averaging parallel/data_parallel)
  set(folders_of_layers parallel/layers parallel/tp parallel/ep)
  set(folders_of_pipeline_parallel parallel/pp)
  set(folders_of_train train/trainer)
  set(programs device parallel layers pipeline_parallel train)
  foreach(folder IN LISTS torch_folders)
    if(NOT folder IN_LIST folders_of_device AND NOT folder IN_LIST folders_of_parallel AND NOT folder IN_LIST folders_of_layers
       AND NOT folder IN_LIST folders_of_pipeline_parallel)
      cadre_test_name(name ${folder})
      set(folders_of_${name} ${folder})
      list(APPEND programs ${name})
    endif()
  endforeach()
  if(CADRE_SANITIZE)  # the folders whose code works on memory by address
    set(programs group hooks optim shard buckets parallel data)
  else()  # half of the time of these is waiting
    set(shards_of_checkpoint SHARDS 2)
    set(shards_of_layers SHARDS 2)
  endif()
  # The late device, a device without hardware, with an engine for its memory. It is left out under
  # sanitizers, which intercept the signal that a test expects.
  if(NOT CADRE_SANITIZE)
    cadre_sources(late_device_sources library testing/torch)
    add_library(cadre_late_device_objects OBJECT ${late_device_sources})
    target_include_directories(cadre_late_device_objects PRIVATE ${CMAKE_SOURCE_DIR})
    target_link_libraries(cadre_late_device_objects PRIVATE LibTorch::LibTorch)
    cadre_compile_as_test(cadre_late_device_objects)
    set(headers cadre_torch_pch)
    if(TARGET cadre_torch_test_pch)
      set(headers cadre_torch_test_pch)
    endif()
    cadre_reuse_torch_headers(cadre_late_device_objects 6 ${headers})
    set(sources_for_device $<TARGET_OBJECTS:cadre_late_device_objects>)
    # A library with NCCL's functions for that device. Tests load it, as the engine loads NCCL.
    add_library(cadre_fake_nccl MODULE testing/torch/fake_nccl/fake_nccl_main.cpp)
    target_include_directories(cadre_fake_nccl PRIVATE ${CMAKE_SOURCE_DIR})
    cadre_compile_as_test(cadre_fake_nccl)
    set_target_properties(cadre_fake_nccl PROPERTIES CXX_VISIBILITY_PRESET hidden
                                                     LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
    add_dependencies(cadre_late_device_objects cadre_fake_nccl)
  endif()
  foreach(name IN LISTS programs)
    cadre_sources(tests test ${folders_of_${name}})
    if(tests)
      cadre_torch_test(cadre_${name}_test ${tests} ${sources_for_${name}})
      cadre_test(NAME ${name} ${shards_of_${name}} COMMAND $<TARGET_FILE:cadre_${name}_test>
                 PROPERTIES TIMEOUT 600 LABELS torch)
    endif()
  endforeach()
  # Its test of the CUDA runtime finds a function of this program, as it finds those of the runtime.
  if(TARGET cadre_device_test)
    target_link_options(cadre_device_test PRIVATE
                        -Wl,--export-dynamic-symbol=cudaThreadExchangeStreamCaptureMode)
  endif()
  if(NOT CADRE_SANITIZE)
    cadre_sources(late_device_tests test testing/torch/late_device)
    cadre_torch_test(cadre_late_device_test ${late_device_tests} $<TARGET_OBJECTS:cadre_late_device_objects>)
    cadre_test(NAME late_device COMMAND $<TARGET_FILE:cadre_late_device_test>
               PROPERTIES TIMEOUT 600 LABELS torch)
  endif()
  # The longest begin first, so that none of them runs alone at the end.
  if(TEST train)
    set_tests_properties(train PROPERTIES COST 100)
  endif()
  # Equality with one process: a share of the cases; `make equality` runs all.
  foreach(name layers parallel pipeline_parallel train)
    if(TEST ${name})
      set_tests_properties(${name} PROPERTIES ENVIRONMENT CADRE_CASES_ONE_IN=6)
    endif()
  endforeach()
  if(TARGET cadre_train_test)
    target_sources(cadre_train_test PRIVATE $<TARGET_OBJECTS:cadre_train_objects>)
  endif()
endif()
